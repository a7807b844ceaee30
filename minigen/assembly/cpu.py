"""How a model's weights are held, and what runs it: chosen once, each choice with its reason.

Two runners give the same answers. The layer-by-layer one is plain torch, and takes anybody's
attention. The compiled one is a whole step in Numba, in the form that the weights are stored in; it
needs Numba, its machine code on disk, and a model of the sizes that its vectors want.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch

from minigen.checkpoint.checkpoint import Checkpoint
from minigen.checkpoint.model_config import ModelConfig
from minigen.config import EngineConfig
from minigen.engine.model_runner import AttentionBackend, PagedRunner
from minigen.errors import OptionError
from minigen.hardware import multiplies_bfloat16
from minigen.kernels.onednn import can_pack, pack, packed_linear
from minigen.kv_cache.block_manager import BlockManager
from minigen.kv_cache.paged import KVPool
from minigen.model.layers import DenseLinear
from minigen.model.transformer import MakeLinear, build_transformer, dense_linear
from minigen.protocols import Linear, Runner
from minigen.sampling.sampler import Choose, choose_tokens

# What the layer-by-layer runner computes in, and keeps keys and values in.
DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.float32,
    "int4": torch.float32,
}
_STORED_AS = {"Q4_0": "int4", "Q4_1": "int4"}
_NO_NUMBA = "Numba is not installed: pip install 'minigen[cpu]'"


@dataclass(frozen=True)
class Plan:
    """The form of the weights and the runner, with the reasons."""

    form: str
    form_reason: str
    compiled: bool
    runner: str
    kv_dtype: str
    default_kv_bytes: int = 2**30
    kernels: str = "Numba"

    def kv_bytes(self, config: ModelConfig) -> int:
        """Bytes of one token's keys and values in one layer; in int8 each has a float32 scale."""
        of_head = config.head_dim + 4
        if self.kv_dtype != "int8":
            of_head = config.head_dim * DTYPES[self.kv_dtype].itemsize
        return 2 * config.kv_heads * of_head

    @property
    def linear(self) -> str:
        """What multiplies."""
        if self.compiled or self.form in ("int8", "int4"):
            return "Numba, weights in panels of sixteen rows"
        return "torch, weights packed for oneDNN" if can_pack(DTYPES[self.form]) else "torch"


def plan(checkpoint: Checkpoint, options: EngineConfig, own_attention: bool) -> Plan:
    """Choose for this model, these options and this processor."""
    if options.kv_cache_dtype == "int8":
        return _with_cache_in_bytes(checkpoint, options, own_attention)
    chosen = _automatic if options.weights == "auto" else _as_asked
    made = chosen(checkpoint, options, own_attention)
    if options.kv_cache_dtype not in ("auto", made.kv_dtype):
        raise OptionError(
            f"kv_cache_dtype={options.kv_cache_dtype!r} is not what keys and values would be kept "
            f"in, which is {made.kv_dtype}, since the runner would be {made.runner}."
        )
    return made


def _with_cache_in_bytes(
    checkpoint: Checkpoint, options: EngineConfig, own_attention: bool
) -> Plan:
    """The compiled step, which is compiled for it if it never was."""
    automatic = options.weights == "auto"
    form = stored_form(checkpoint) if automatic else options.weights
    obstacle = _obstacle(checkpoint, options, own_attention, form)
    if obstacle is not None:
        raise OptionError(f"kv_cache_dtype='int8' needs the compiled step, but {obstacle}.")
    reason = "auto: as stored" if automatic else "as asked"
    return replace(_plan(form, reason, None), kv_dtype="int8")


def _as_asked(checkpoint: Checkpoint, options: EngineConfig, own_attention: bool) -> Plan:
    form = options.weights
    if form in ("int8", "int4") and not has_numba():
        raise OptionError(f"weights={form!r} is multiplied by Numba's kernels. {_NO_NUMBA}.")
    obstacle = _obstacle(checkpoint, options, own_attention, form)
    if obstacle is None and form == "bfloat16":
        obstacle = _not_compiled(form)
    return _plan(form, "as asked", obstacle)


def _automatic(checkpoint: Checkpoint, options: EngineConfig, own_attention: bool) -> Plan:
    form = stored_form(checkpoint)
    torch_form = "bfloat16" if multiplies_bfloat16() else "float32"
    obstacle = _obstacle(checkpoint, options, own_attention, form)
    obstacle = obstacle or _not_compiled(form) or _slower_than_torch(form, torch_form)
    if obstacle is None:
        return _plan(form, "auto: as stored, and fastest so on this processor", None)
    if torch_form == "bfloat16":
        return _plan("bfloat16", "auto: this processor multiplies bfloat16", obstacle)
    return _plan("float32", "auto: this processor has no instructions for bfloat16", obstacle)


def _slower_than_torch(form: str, torch_form: str) -> str | None:
    """Whether the compiled step was slower than torch when it was compiled here."""
    from minigen.kernels.cpu.runner import speeds

    found = speeds(form)
    if found["compiled"] >= found[torch_form]:
        return None
    compiled, other = (f"{found[each] / 1e9:.1f}" for each in ("compiled", torch_form))
    return (
        f"here its kernels multiply {compiled} billion weights of the form {form} a second, torch "
        f"{other} in {torch_form}"
    )


def stored_form(checkpoint: Checkpoint) -> str:
    """The smallest form that loses nothing, or next to nothing, of what the file holds."""
    sizes: dict[str, int] = {}
    for name, tensor in checkpoint.tensors.items():
        if ".layers." in name and len(tensor.shape) == 2:
            form = _STORED_AS.get(tensor.kind, "int8")
            sizes[form] = sizes.get(form, 0) + tensor.num_bytes
    return "int4" if set(sizes) == {"int4"} else "int8"


def _plan(form: str, form_reason: str, obstacle: str | None) -> Plan:
    if obstacle is None:
        return Plan(form, form_reason, True, "a whole step compiled by Numba", "bfloat16")
    kept = str(DTYPES[form]).removeprefix("torch.")
    return Plan(form, form_reason, False, f"torch, layer by layer ({obstacle})", kept)


def _obstacle(
    checkpoint: Checkpoint, options: EngineConfig, own_attention: bool, form: str
) -> str | None:
    """What keeps the compiled step from running, if anything does."""
    if form == "float32":
        return "the compiled step has no float32 weights"
    if options.tensor_parallel_size > 1:
        return f"the model is split over {options.tensor_parallel_size} processes"
    if not own_attention:
        return "attention was passed in"
    if not has_numba():
        return _NO_NUMBA
    from minigen.kernels.cpu.step import refusal

    return refusal(checkpoint.config, options.block_size)


def _not_compiled(form: str) -> str | None:
    from minigen.kernels.cpu.runner import is_compiled

    return None if is_compiled(form) else "its kernels are not compiled yet: minigen compile"


def has_numba() -> bool:
    """Whether Numba is installed."""
    return find_spec("numba") is not None


def make_runner(
    checkpoint: Checkpoint,
    options: EngineConfig,
    manager: BlockManager,
    chosen: Plan,
    num_blocks: int,
    attend: AttentionBackend,
    num_threads: int,
) -> Runner:
    """The runner of the plan, with memory for `num_blocks` blocks of keys and values."""
    if chosen.compiled:
        return _compiled_runner(checkpoint, options, manager, chosen, num_blocks, num_threads)
    config, dtype = checkpoint.config, DTYPES[chosen.form]
    sizes = (config.kv_heads, options.block_size, config.head_dim)
    with memory_for(num_blocks, options.block_size):
        pool = KVPool(config.num_layers, num_blocks, *sizes, dtype)
    make_linear, finish_head = linears(chosen.form, num_threads)
    with one_thread():
        model = build_transformer(config, checkpoint.tensors, dtype, make_linear, finish_head)
    return PagedRunner(
        model,
        pool,
        manager,
        config.sliding_windows,
        options.max_num_batched_tokens,
        num_threads,
        attend,
    )


def make_chooser(chosen: Plan, vocab: int, num_threads: int) -> Choose:
    """What chooses tokens: kernels where they are compiled, or else torch."""
    if not chosen.compiled:
        return choose_tokens
    from minigen.kernels.cpu.runner import KernelChooser

    return KernelChooser(vocab, num_threads)


def _compiled_runner(
    checkpoint: Checkpoint,
    options: EngineConfig,
    manager: BlockManager,
    chosen: Plan,
    num_blocks: int,
    num_threads: int,
) -> Runner:
    from minigen.kernels.cpu.compile import compile_step
    from minigen.kernels.cpu.kv_layout import PanelPool
    from minigen.kernels.cpu.runner import CompiledRunner
    from minigen.kernels.cpu.step import kernel_shape, kernel_weights

    compile_step(chosen.form, chosen.kv_dtype)
    config = checkpoint.config
    shape = kernel_shape(config, options.block_size, num_blocks, chosen.kv_dtype)
    with memory_for(num_blocks, options.block_size):
        pool = PanelPool(shape, chosen.kv_dtype)
    with one_thread():
        weights = kernel_weights(config, checkpoint.tensors, chosen.form)
    return CompiledRunner(
        shape,
        weights,
        pool,
        manager,
        config.sliding_windows,
        options.max_num_batched_tokens,
        num_threads,
    )


def linears(form: str, num_threads: int) -> tuple[MakeLinear, Callable[[DenseLinear], Linear]]:
    """How linear layers are made, and what becomes of a head that is the embedding."""
    if form in ("int8", "int4"):
        from minigen.kernels.cpu.linear import panel_linear

        return panel_linear(form, num_threads), lambda head: head
    if can_pack(DTYPES[form]):
        return packed_linear(DTYPES[form]), pack
    return dense_linear(DTYPES[form]), lambda head: head


@contextmanager
def memory_for(num_blocks: int, block_size: int) -> Iterator[None]:
    """Raises `OptionError` where the system refuses the memory of so many blocks."""
    try:
        yield
    except (OSError, OverflowError, ValueError) as error:
        raise OptionError(
            f"num_blocks {num_blocks} of {block_size} tokens each are more memory than "
            f"this machine gives: {error}."
        ) from error


@contextmanager
def one_thread() -> Iterator[None]:
    """Unpack weights without torch's threads: they gain little by many small products, and where
    another program keeps a core busy their waiting for each other takes twenty times as long."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
