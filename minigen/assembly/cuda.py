"""Builds the parts of an engine that need Triton; one clear error states what is missing.

Triton is imported only when one of these parts is built.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from minigen.config import EngineConfig
from minigen.engine.model_runner import AttentionBackend
from minigen.errors import OptionError
from minigen.kv_cache.block_manager import BlockManager
from minigen.model.transformer import build_transformer, dense_linear
from minigen.protocols import Runner
from minigen.sampling.sampler import Choose
from minigen.trace.events import Trace

if TYPE_CHECKING:  # reading checkpoints needs packages that the kernels do not need
    from minigen.checkpoint.checkpoint import Checkpoint
    from minigen.parallel.gpu import GpuGroup

DTYPE = torch.bfloat16
_SHARE_FOR_CACHE = 0.9  # of the memory that weights and a step leave free
_FIRST_WITH_BFLOAT16 = (8, 0)  # compute capability: Ampere


@dataclass(frozen=True)
class CudaPlan:
    """A `minigen.assembly.build.Plan` on a GPU, or on one per rank of `group`.

    On the `device` "cpu", in Triton's interpreter, no graph is captured, and `dtype` is float32.
    """

    checkpoint: "Checkpoint"
    options: EngineConfig
    default_kv_bytes: int
    group: "GpuGroup | None" = None
    kv_fixed_bytes: int = 0
    tokens_by: str = "Triton"
    device: str = "cuda"
    dtype: torch.dtype = DTYPE

    @property
    def kv_dtype(self) -> str:
        """The data type of keys and values."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def kv_bytes(self) -> int:
        """The bytes of one token's key and value in one layer; a rank has at least one head."""
        config = self.checkpoint.config
        kv_heads = max(config.kv_heads, self.options.tensor_parallel_size)
        return 2 * kv_heads * config.head_dim * self.dtype.itemsize

    def describe(self) -> dict[str, str]:
        """Return what was chosen for each part, and why."""
        graphs, ranks = "decode steps as CUDA graphs", {}
        if self.group is not None:
            messages = "NCCL" if self.device == "cuda" else "gloo"
            count = self.options.tensor_parallel_size
            ranks["ranks"] = f"{count} processes with a GPU each, over gloo; sums over {messages}"
            graphs += " with their messages"
            if self.group.obstacle is not None:
                graphs = f"no CUDA graphs: {self.group.obstacle}"
        return {
            "weights": f"{self.kv_dtype} (the data type of device='cuda')",
            "runner": f"Triton's kernels and torch's matrix products, {graphs}",
            **ranks,
            "linear": "torch, on the GPU",
            "attention": "attend_triton",
        }

    def close(self) -> None:
        """End the other ranks, if there are any."""
        if self.group is not None:
            self.group.close()

    def chooser(self, num_threads: int) -> Choose:
        """Return the function that chooses tokens from logits on the GPU."""
        from minigen.kernels.triton.runner import choose_on_device

        return choose_on_device

    def build(
        self, manager: BlockManager, num_blocks: int, num_threads: int, trace: Trace
    ) -> tuple[Runner, Callable[[], Any]]:
        """Build the runner, with CUDA graphs of decode steps, and what ends the other ranks.

        Weights are read onto the device, by each rank its share.
        """
        if self.group is None:
            return self._whole(manager, num_blocks), lambda: None  # no other process to end
        from minigen.parallel.gpu import StepSizes

        options, max_blocks = self.options, manager.tables.shape[1]
        sizes = StepSizes(options.block_size, num_blocks, options.max_num_seqs, max_blocks)
        driver = self.group.start(sizes, manager, options.max_num_batched_tokens)
        return driver, driver.close

    def _whole(self, manager: BlockManager, num_blocks: int) -> Runner:
        from minigen.kernels.triton import kernel_model, runner
        from minigen.kernels.triton.attention import DevicePool

        options, config = self.options, self.checkpoint.config
        device = torch.device(self.device)
        make_linear = dense_linear(self.dtype, device)
        model = build_transformer(config, self.checkpoint.tensors, self.dtype, make_linear)
        sizes = (config.kv_heads, options.block_size, config.head_dim)
        try:
            pool = DevicePool(config.num_layers, num_blocks, *sizes, self.dtype, device)
        except torch.cuda.OutOfMemoryError as error:
            raise OptionError(
                f"num_blocks {num_blocks} of {options.block_size} tokens each need more memory "
                "than the GPU has free."
            ) from error
        return runner.GpuRunner(
            kernel_model.kernel_model(model, config.max_positions, device),
            pool,
            manager,
            config.sliding_windows,
            options.max_num_batched_tokens,
            runner.captured_sizes(options.max_num_seqs) if device.type == "cuda" else (),
        )


def plan(checkpoint: "Checkpoint", options: EngineConfig, trace: Trace) -> CudaPlan:
    """Choose how this model runs on this machine's GPUs. Raises `OptionError` if it cannot.

    Ranks of a split model are started and connected here, because the size of the KV cache depends
    on the memory of all of them; nothing is loaded yet.
    """
    if options.attention_backend not in ("auto", "triton"):
        raise OptionError("device='cuda' has its own attention: leave attention_backend at 'auto'.")
    _need_triton("device='cuda'")
    if not torch.cuda.is_available():
        raise OptionError(
            "device='cuda' needs an NVIDIA GPU and a torch that is built for it; torch finds none: "
            "leave device at 'cpu'."
        )
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise OptionError(
            "device='cuda' needs compiled kernels, and TRITON_INTERPRET=1 asks for Triton's "
            "interpreter: unset it before Python starts, or leave device at 'cpu'."
        )
    for name in ("weights", "kv_cache_dtype"):
        if getattr(options, name) not in ("auto", "bfloat16"):
            raise OptionError(
                f"{name}={getattr(options, name)!r} does not work with device='cuda', which "
                "computes in bfloat16 only: leave it at 'auto'."
            )
    if options.tensor_parallel_size > 1:
        return _split(checkpoint, options, "cuda", DTYPE, trace)
    _check_capability(torch.cuda.current_device())
    torch.cuda.empty_cache()  # memory that torch still caches for earlier models counts as free
    free, _ = torch.cuda.mem_get_info()
    left = left_for_cache(free, checkpoint, options, DTYPE, _SHARE_FOR_CACHE)
    return CudaPlan(checkpoint, options, left)


def interpreted_plan(checkpoint: "Checkpoint", options: EngineConfig, trace: Trace) -> CudaPlan:
    """Return the plan of ranks with GPUs for Triton's interpreter: CPUs, float32 and gloo.

    It is for tests and learning, with `tensor_parallel_size` above 1 and TRITON_INTERPRET=1.
    """
    return _split(checkpoint, options, "cpu", torch.float32, trace)


def _split(
    checkpoint: "Checkpoint", options: EngineConfig, device: str, dtype: torch.dtype, trace: Trace
) -> CudaPlan:
    from minigen.parallel.gpu import GpuGroup
    from minigen.parallel.sharding import check_ranks

    ranks = options.tensor_parallel_size
    check_ranks(checkpoint.config, checkpoint.tensors, "bfloat16", ranks)
    if device == "cuda":
        _check_gpus(ranks)
    group = GpuGroup(checkpoint, ranks, device, dtype, trace)
    sizes = (checkpoint, options, DTYPE, _SHARE_FOR_CACHE)
    left = ranks * left_for_cache(group.free_bytes, *sizes)
    return CudaPlan(checkpoint, options, left, group, device=device, dtype=dtype)


def _check_gpus(num_ranks: int) -> None:
    """Raise `OptionError` if this machine has fewer GPUs than ranks, or one that is too old."""
    from minigen.parallel.launch import num_local_ranks

    needed, found = num_local_ranks(num_ranks), torch.cuda.device_count()
    if found < needed:
        raise OptionError(
            f"tensor_parallel_size {num_ranks} with device='cuda' needs {needed} GPUs on this "
            f"machine, one per rank, and torch finds {found}: set it to {found} or less."
        )
    for index in range(needed):
        _check_capability(index)


def _check_capability(index: int) -> None:
    """Raise `OptionError` if a GPU of NVIDIA has no bfloat16."""
    capability = torch.cuda.get_device_capability(index)
    if torch.version.hip is None and capability < _FIRST_WITH_BFLOAT16:
        raise OptionError(
            "device='cuda' computes in bfloat16, which needs compute capability "
            f"{_dotted(_FIRST_WITH_BFLOAT16)} or more; GPU {index}, "
            f"{torch.cuda.get_device_name(index)}, has {_dotted(capability)}: leave device at "
            "'cpu'."
        )


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(str(each) for each in capability)


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


def left_for_cache(
    free: int,
    checkpoint: "Checkpoint",
    options: EngineConfig,
    dtype: torch.dtype,
    share: float,
) -> int:
    """Return this `share` of the bytes, of `free` ones, that weights and the largest step leave.

    Each rank holds about as much as rank 0, and all of them hold logits of the whole vocabulary.
    """
    config, num_parameters = checkpoint.config, checkpoint.num_parameters
    vocab_size, ranks = config.vocab_size, options.tensor_parallel_size
    if ranks > 1:
        from minigen.parallel.sharding import local_config, shard_tensors

        shares = shard_tensors(checkpoint.tensors, config, 0, ranks)
        num_parameters = sum(prod(each.shape) for each in shares.values())
        config = local_config(config, 0, ranks)
    widest = 3 * config.ffn + 4 * config.hidden + 4 * config.q_heads * config.head_dim
    step = options.max_num_batched_tokens * widest * dtype.itemsize
    logits = 3 * options.max_num_seqs * vocab_size * 4
    tables = config.max_positions * config.head_dim * 4
    weights = num_parameters * dtype.itemsize
    return max(int((free - weights - step - logits - tables) * share), 0)


def _need_triton(option: str) -> None:
    if find_spec("triton") is None:
        raise OptionError(f"{option} needs Triton: pip install 'minigen[gpu]' (for Linux).")
