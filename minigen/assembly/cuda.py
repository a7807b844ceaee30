"""Builds the parts of an engine that need Triton; one clear error states what is missing.

Triton is imported only when one of these parts is built.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from minigen.config import EngineConfig
from minigen.engine.model_runner import AttentionBackend
from minigen.errors import OptionError
from minigen.kv_cache.block_manager import BlockManager
from minigen.model.transformer import build_transformer
from minigen.protocols import Runner
from minigen.sampling.sampler import Choose
from minigen.trace.events import Trace

if TYPE_CHECKING:  # reading checkpoints needs packages that the kernels do not need
    from minigen.checkpoint.checkpoint import Checkpoint

DTYPE = torch.bfloat16
_SHARE_FOR_CACHE = 0.9  # of the memory that weights and a step leave free


@dataclass(frozen=True)
class CudaPlan:
    """A `minigen.assembly.build.Plan` on a GPU."""

    checkpoint: "Checkpoint"
    options: EngineConfig
    default_kv_bytes: int
    kv_dtype: str = "bfloat16"
    kv_fixed_bytes: int = 0
    tokens_by: str = "Triton"
    device: str = "cuda"

    @property
    def kv_bytes(self) -> int:
        """The bytes of one token's key and value in one layer."""
        config = self.checkpoint.config
        return 2 * config.kv_heads * config.head_dim * DTYPE.itemsize

    def describe(self) -> dict[str, str]:
        """Return what was chosen for each part, and why."""
        return {
            "weights": "bfloat16 (the data type of device='cuda')",
            "runner": "Triton's kernels and torch's matrix products, decode steps as CUDA graphs",
            "linear": "torch, on the GPU",
            "attention": "attend_triton",
        }

    def chooser(self, num_threads: int) -> Choose:
        """Return the function that chooses tokens from logits on the GPU."""
        from minigen.kernels.triton.runner import choose_on_device

        return choose_on_device

    def build(
        self, manager: BlockManager, num_blocks: int, num_threads: int, trace: Trace
    ) -> tuple[Runner, Callable[[], Any]]:
        """Build the runner, with CUDA graphs of decode steps; weights are read onto the device.

        Nothing is to be ended. On the device "cpu", in Triton's interpreter, no graph is captured.
        """
        from minigen.kernels.triton import runner
        from minigen.kernels.triton.attention import DevicePool

        options, config = self.options, self.checkpoint.config
        device = torch.device(self.device)
        make_linear = runner.device_linear(DTYPE, device)
        model = build_transformer(config, self.checkpoint.tensors, DTYPE, make_linear)
        sizes = (config.kv_heads, options.block_size, config.head_dim)
        try:
            pool = DevicePool(config.num_layers, num_blocks, *sizes, DTYPE, device)
        except torch.cuda.OutOfMemoryError as error:
            raise OptionError(
                f"num_blocks {num_blocks} of {options.block_size} tokens each need more memory "
                "than the GPU has free."
            ) from error
        built = runner.GpuRunner(
            runner.kernel_model(model, config.max_positions, device),
            pool,
            manager,
            config.sliding_windows,
            options.max_num_batched_tokens,
            runner.captured_sizes(options.max_num_seqs) if device.type == "cuda" else (),
        )
        return built, lambda: None


def plan(checkpoint: "Checkpoint", options: EngineConfig) -> CudaPlan:
    """Choose how this model runs on this machine's GPU. Raises `OptionError` if it cannot."""
    if options.attention_backend not in ("auto", "triton"):
        raise OptionError("device='cuda' has its own attention: leave attention_backend at 'auto'.")
    _need_triton("device='cuda'")
    if not torch.cuda.is_available():
        raise OptionError(
            "device='cuda' needs an NVIDIA GPU and a torch that is built for it; torch finds none: "
            "leave device at 'cpu'."
        )
    for name in ("weights", "kv_cache_dtype"):
        if getattr(options, name) not in ("auto", "bfloat16"):
            raise OptionError(
                f"{name}={getattr(options, name)!r} does not work with device='cuda', which "
                "computes in bfloat16 only: leave it at 'auto'."
            )
    return CudaPlan(checkpoint, options, _free_for_cache(checkpoint, options))


def interpreted_attention(weights: str) -> AttentionBackend:
    """Return the attention in Triton's interpreter on a CPU. Raises `OptionError` if it cannot run.

    `weights` is the engine's option.
    """
    _need_triton("attention_backend='triton'")
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise OptionError(
            "attention_backend='triton' runs on a CPU only in Triton's interpreter, for tests and "
            "learning: set TRITON_INTERPRET=1 before Python starts, or choose device='cuda'."
        )
    if weights != "float32":
        raise OptionError(
            "attention_backend='triton' on a CPU needs weights='float32', because Triton's "
            "interpreter gives wrong results in bfloat16."
        )
    from minigen.kernels.triton.attention import attend_triton

    return attend_triton


def _free_for_cache(checkpoint: "Checkpoint", options: EngineConfig) -> int:
    """Return the bytes of GPU memory that weights and the largest step leave to the KV cache."""
    torch.cuda.empty_cache()  # memory that torch still caches for earlier models counts as free
    config, (free, _) = checkpoint.config, torch.cuda.mem_get_info()
    widest = 3 * config.ffn + 4 * config.hidden + 4 * config.q_heads * config.head_dim
    step = options.max_num_batched_tokens * widest * DTYPE.itemsize
    logits = 3 * options.max_num_seqs * config.vocab_size * 4
    tables = config.max_positions * config.head_dim * 4
    weights = checkpoint.num_parameters * DTYPE.itemsize
    return max(int((free - weights - step - logits - tables) * _SHARE_FOR_CACHE), 0)


def _need_triton(option: str) -> None:
    if find_spec("triton") is None:
        raise OptionError(f"{option} needs Triton: pip install 'minigen[gpu]' (for Linux).")
