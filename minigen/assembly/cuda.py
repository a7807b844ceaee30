"""Builds the parts of an engine that need Triton; one clear error states what is missing.

Triton is imported only when one of these parts is built.
"""

import os
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from minigen.checkpoint.model_config import ModelConfig
from minigen.config import EngineConfig
from minigen.engine.model_runner import AttentionBackend
from minigen.errors import OptionError
from minigen.kv_cache.block_manager import BlockManager
from minigen.kv_cache.paged import Batch, KVPool
from minigen.model.transformer import build_transformer
from minigen.protocols import Attend, Runner
from minigen.sampling.sampler import Choose

if TYPE_CHECKING:  # reading checkpoints needs packages that the kernels do not need
    from minigen.checkpoint.checkpoint import Checkpoint

DTYPE = torch.bfloat16
_SHARE_FOR_CACHE = 0.9  # of the memory that weights and a step leave free


@dataclass(frozen=True)
class GpuPlan:
    """The weight format and the runner on a GPU; the counterpart of `minigen.assembly.cpu.Plan`."""

    default_kv_bytes: int
    form: str = "bfloat16"
    form_reason: str = "the data type of device='cuda'"
    compiled: bool = False
    runner: str = "Triton's kernels and torch's matrix products, decode steps as CUDA graphs"
    kv_dtype: str = "bfloat16"
    linear: str = "torch, on the GPU"
    kernels: str = "Triton"

    def kv_bytes(self, config: ModelConfig) -> int:
        """Return the bytes of one token's key and value in one layer."""
        return 2 * config.kv_heads * config.head_dim * DTYPE.itemsize


def attend_by_kernels(pool: KVPool, batch: Batch, windows: SequenceOf[int | None]) -> Attend:
    """Run `attention_backend="triton"`; `assemble` calls `kernel_attention` instead of this."""
    return kernel_attention(EngineConfig(weights="float32"))(pool, batch, windows)


def kernel_attention(options: EngineConfig) -> AttentionBackend:
    """Return the attention in Triton, on a GPU, or on a CPU in Triton's interpreter.

    Raises `OptionError` if it cannot run, or if another attention was requested on a GPU.
    """
    if options.device == "cuda" and options.attention_backend not in ("auto", "triton"):
        raise OptionError("device='cuda' has its own attention: leave attention_backend at 'auto'.")
    _need_triton("device='cuda'" if options.device == "cuda" else "attention_backend='triton'")
    if options.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise OptionError(
            "attention_backend='triton' runs on a CPU only in Triton's interpreter, for tests and "
            "learning: set TRITON_INTERPRET=1 before Python starts, or choose device='cuda'."
        )
    if options.device == "cpu" and options.weights != "float32":
        raise OptionError(
            "attention_backend='triton' on a CPU needs weights='float32', because Triton's "
            "interpreter gives wrong results in bfloat16."
        )
    from minigen.kernels.triton.attention import attend_triton

    return attend_triton


def gpu_plan(checkpoint: "Checkpoint", options: EngineConfig) -> GpuPlan:
    """Choose how this model runs on this machine's GPU. Raises `OptionError` if it cannot."""
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
    return GpuPlan(_free_for_cache(checkpoint, options))


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


def gpu_runner(
    checkpoint: "Checkpoint",
    options: EngineConfig,
    manager: BlockManager,
    num_blocks: int,
    device_name: str = "cuda",
) -> Runner:
    """Build the runner on the GPU, with CUDA graphs of decode steps; weights are read onto it.

    On the device "cpu", in Triton's interpreter, no graph is captured.
    """
    from minigen.kernels.triton.attention import DevicePool
    from minigen.kernels.triton.runner import GpuRunner, captured_sizes, device_linear, kernel_model

    device, config = torch.device(device_name), checkpoint.config
    make_linear = device_linear(DTYPE, device)
    model = build_transformer(config, checkpoint.tensors, DTYPE, make_linear)
    sizes = (config.kv_heads, options.block_size, config.head_dim)
    try:
        pool = DevicePool(config.num_layers, num_blocks, *sizes, DTYPE, device)
    except torch.cuda.OutOfMemoryError as error:
        raise OptionError(
            f"num_blocks {num_blocks} of {options.block_size} tokens each need more memory than "
            "the GPU has free."
        ) from error
    return GpuRunner(
        kernel_model(model, config.max_positions, device),
        pool,
        manager,
        config.sliding_windows,
        options.max_num_batched_tokens,
        captured_sizes(options.max_num_seqs) if device.type == "cuda" else (),
    )


def gpu_chooser() -> Choose:
    """Return the function that chooses tokens from logits on a GPU."""
    from minigen.kernels.triton.runner import choose_on_device

    return choose_on_device


def _need_triton(option: str) -> None:
    if find_spec("triton") is None:
        raise OptionError(f"{option} needs Triton: pip install 'minigen[gpu]' (for Linux).")
