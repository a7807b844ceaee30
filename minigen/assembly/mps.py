"""Plans a model on an Apple GPU: torch's layers on the device "mps" (Metal Performance Shaders).

It is written after torch's documentation (the notes "MPS backend", `torch.backends.mps` and
`torch.mps`), and was never run on such a machine. The same plan runs on any device of torch, which
is passed in: the tests run it on a CPU, and on torch's device "meta", where values do not exist.

torch 2.13 is needed, because earlier versions may return wrong attention on this device, without an
error, for queries and keys that are not contiguous, or with a mask of a decode step (PyTorch's pull
requests 181151 and 182285). This torch runs on macOS 14 and later, where the device has bfloat16.
It has no float64, which no layer needs; sampling draws in float64, on the CPU. If the backend
lacked an operator, torch would raise an error that names PYTORCH_ENABLE_MPS_FALLBACK.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from minigen.assembly.cuda import left_for_cache
from minigen.assembly.torch_layers import build_runner, memory_for
from minigen.checkpoint.checkpoint import Checkpoint
from minigen.config import EngineConfig
from minigen.engine.placement import PlacedKVPool
from minigen.errors import OptionError
from minigen.kv_cache.block_manager import BlockManager
from minigen.kv_cache.paged import attend_paged
from minigen.model.transformer import dense_linear
from minigen.protocols import Runner
from minigen.sampling.sampler import Choose, choose_tokens
from minigen.trace.events import Trace

_OLDEST_TORCH = (2, 13)
_DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_KV_DTYPES = {torch.bfloat16: ("auto", "bfloat16"), torch.float32: ("auto",)}
# The memory is also that of the CPU and of other programs, and attention copies keys and values.
_SHARE_FOR_CACHE = 0.5


@dataclass(frozen=True)
class DevicePlan:
    """A `minigen.assembly.build.Plan` of torch's layers on `device`, in one process."""

    checkpoint: Checkpoint
    options: EngineConfig
    device: torch.device
    default_kv_bytes: int
    kv_fixed_bytes: int = 0
    tokens_by: str = "torch, on the CPU"

    @property
    def dtype(self) -> torch.dtype:
        """The data type of weights, activations, keys and values."""
        return _DTYPES[self.options.weights]

    @property
    def kv_dtype(self) -> str:
        """The data type of keys and values."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def kv_bytes(self) -> int:
        """The bytes of one token's key and value in one layer."""
        config = self.checkpoint.config
        return 2 * config.kv_heads * config.head_dim * self.dtype.itemsize

    def describe(self) -> dict[str, str]:
        """Return what was chosen for each part, and why."""
        reason = "as requested"
        if self.options.weights == "auto":
            reason = "auto: this torch's MPS backend runs on macOS 14 and later, which has it"
        return {
            "weights": f"{self.kv_dtype} ({reason})",
            "runner": f"torch, layer by layer, on device {self.device.type!r}",
            "linear": f"torch, on device {self.device.type!r}",
            "attention": attend_paged.__name__,
        }

    def chooser(self, num_threads: int) -> Choose:
        """Return torch's function that chooses tokens, on the CPU."""
        return choose_tokens

    def build(
        self, manager: BlockManager, num_blocks: int, num_threads: int, trace: Trace
    ) -> tuple[Runner, Callable[[], Any]]:
        """Build the runner, with memory for `num_blocks` blocks; there is no process to end."""
        config, options = self.checkpoint.config, self.options
        sizes = (config.kv_heads, options.block_size, config.head_dim, self.dtype, self.device)
        with memory_for(num_blocks, options.block_size):
            pool = PlacedKVPool(config.num_layers, num_blocks, *sizes)
        linears = (dense_linear(self.dtype, self.device), lambda head: head)
        attend = partial(attend_paged, device=self.device)
        where = (pool, attend, self.dtype, self.device, linears, str(self.dtype))
        return build_runner(self.checkpoint, options, manager, num_threads, *where), lambda: None

    def close(self) -> None:
        """Do nothing: planning starts no process."""


def plan(checkpoint: Checkpoint, options: EngineConfig) -> DevicePlan:
    """Choose how this model runs on this machine's Apple GPU. Raises `OptionError` if it cannot."""
    check_options(options)
    lacking = _lacking()
    if lacking is not None:
        raise OptionError(
            "device='mps' needs a Mac with Apple silicon, macOS 14 or later, and torch 2.13 or "
            f"later; {lacking}; use device='cpu'."
        )
    torch.mps.empty_cache()  # memory that torch still caches for earlier models counts as free
    free = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    return plan_on(torch.device("mps"), free, checkpoint, options)


def plan_on(
    device: torch.device, free: int, checkpoint: Checkpoint, options: EngineConfig
) -> DevicePlan:
    """Choose how this model runs on a device of torch that has `free` bytes left."""
    dtype = _DTYPES[options.weights]
    left = left_for_cache(free, checkpoint, options, dtype, _SHARE_FOR_CACHE)
    return DevicePlan(checkpoint, options, device, left)


def check_options(options: EngineConfig) -> None:
    """Raise `OptionError` for an option that torch's layers on this device do not have."""
    if options.attention_backend not in ("auto", "torch"):
        raise OptionError(
            "device='mps' has its own attention, in torch: leave attention_backend at 'auto'."
        )
    if options.weights not in _DTYPES:
        raise OptionError(
            f"weights={options.weights!r} does not work with device='mps', which has no kernels "
            "for quantized weights: leave it at 'auto' (a quantized file is then computed in "
            "bfloat16), or use device='cpu'."
        )
    dtype = _DTYPES[options.weights]
    if options.kv_cache_dtype not in _KV_DTYPES[dtype]:
        raise OptionError(
            f"kv_cache_dtype={options.kv_cache_dtype!r} does not work with device='mps' and "
            f"weights={options.weights!r}, which store keys and values in "
            f"{str(dtype).removeprefix('torch.')}: leave it at 'auto', or use device='cpu'."
        )


def _lacking() -> str | None:
    """Return why torch cannot compute on an Apple GPU here, or None if it can."""
    version = tuple(int(number) for number in torch.__version__.split(".")[:2])
    if not torch.backends.mps.is_built():
        return "this machine's torch is built without its MPS backend"
    if not torch.backends.mps.is_available():
        return "this machine's torch finds no such GPU, or an older macOS"
    if version < _OLDEST_TORCH:
        return f"this machine has torch {torch.__version__}"
    return None
