"""The parts of an engine that need Triton, chosen here: one clear sentence where they are missing.

Nothing of Triton is imported before it is asked for.
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

if TYPE_CHECKING:  # reading checkpoints takes packages that no kernel needs
    from minigen.checkpoint.checkpoint import Checkpoint

DTYPE = torch.bfloat16
_SHARE_FOR_CACHE = 0.9  # of what weights and a step leave free


@dataclass(frozen=True)
class GpuPlan:
    """What `minigen.assembly.cpu.Plan` tells, for a GPU."""

    default_kv_bytes: int
    form: str = "bfloat16"
    form_reason: str = "what device='cuda' computes in"
    compiled: bool = False
    runner: str = "Triton's kernels and torch's products, decodes as CUDA graphs"
    kv_dtype: str = "bfloat16"
    linear: str = "torch, on the GPU"
    kernels: str = "Triton"

    def kv_bytes(self, config: ModelConfig) -> int:
        """Bytes of one token's keys and values in one layer."""
        return 2 * config.kv_heads * config.head_dim * DTYPE.itemsize


def attend_by_kernels(pool: KVPool, batch: Batch, windows: SequenceOf[int | None]) -> Attend:
    """`attention_backend="triton"`: the known name's value, which `kernel_attention` stands in for."""
    return kernel_attention(EngineConfig(weights="float32"))(pool, batch, windows)


def kernel_attention(options: EngineConfig) -> AttentionBackend:
    """The attention in Triton, on a GPU, or on a CPU in Triton's interpreter.

    Raises `OptionError` where it cannot run, or where another one was asked for on a GPU.
    """
    if options.device == "cuda" and options.attention_backend not in ("auto", "triton"):
        raise OptionError("device='cuda' has its own attention: leave attention_backend at 'auto'.")
    _need_triton("device='cuda'" if options.device == "cuda" else "attention_backend='triton'")
    if options.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise OptionError(
            "attention_backend='triton' runs on a CPU only in Triton's interpreter, for tests and to learn: "
            "set TRITON_INTERPRET=1 before Python starts, or choose device='cuda'."
        )
    if options.device == "cpu" and options.weights != "float32":
        raise OptionError(
            "attention_backend='triton' on a CPU needs weights='float32': Triton's interpreter computes "
            "wrongly in bfloat16."
        )
    from minigen.kernels.triton.attention import attend_triton

    return attend_triton


def gpu_plan(checkpoint: "Checkpoint", options: EngineConfig) -> GpuPlan:
    """How this model runs on this machine's GPU; raises `OptionError` if it cannot."""
    _need_triton("device='cuda'")
    if not torch.cuda.is_available():
        raise OptionError(
            "device='cuda' needs an NVIDIA GPU and a torch that is built for it; torch finds none: "
            "leave device at 'cpu'."
        )
    for name in ("weights", "kv_cache_dtype"):
        if getattr(options, name) not in ("auto", "bfloat16"):
            raise OptionError(
                f"{name}={getattr(options, name)!r} is not for device='cuda', where all is in "
                "bfloat16."
            )
    return GpuPlan(_free_for_cache(checkpoint, options))


def _free_for_cache(checkpoint: "Checkpoint", options: EngineConfig) -> int:
    """Bytes of the GPU's memory that the weights and the largest step leave to the cache."""
    torch.cuda.empty_cache()  # what torch keeps of models before counts as free
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
    """The model on the GPU, its weights read straight into it, decode steps captured.

    On the device "cpu", in Triton's interpreter, nothing is captured.
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
            f"num_blocks {num_blocks} of {options.block_size} tokens each are more memory than the "
            "GPU has free."
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
    """What chooses tokens where logits are on a GPU."""
    from minigen.kernels.triton.runner import choose_on_device

    return choose_on_device


def _need_triton(asked: str) -> None:
    if find_spec("triton") is None:
        raise OptionError(f"{asked} needs Triton: pip install 'minigen[gpu]' (for Linux).")
