"""Chooses the weight format and the runner on a CPU once, each choice with its reason.

Two runners give the same answers. The layer-by-layer runner is plain torch, and accepts an
attention function of the user. The compiled runner is a whole step in Numba, on the weights in
their stored format. It needs Numba, its machine code on disk, and a model whose sizes fit its
vectors.
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

# The data type that the layer-by-layer runner computes in, also that of its KV cache.
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
    """The weight format and the runner, with the reasons."""

    form: str
    form_reason: str
    compiled: bool
    runner: str
    kv_dtype: str
    default_kv_bytes: int = 2**30
    kernels: str = "Numba"

    def kv_bytes(self, config: ModelConfig) -> int:
        """Return the bytes of one token's key and value in one layer.

        In int8 each head's vector has a float32 scale.
        """
        head_bytes = config.head_dim + 4
        if self.kv_dtype != "int8":
            head_bytes = config.head_dim * DTYPES[self.kv_dtype].itemsize
        return 2 * config.kv_heads * head_bytes

    @property
    def linear(self) -> str:
        """The implementation of the linear layers."""
        if self.compiled or self.form in ("int8", "int4"):
            return "Numba, weights packed in panels of sixteen rows"
        return "torch, weights packed for oneDNN" if can_pack(DTYPES[self.form]) else "torch"


def plan(checkpoint: Checkpoint, options: EngineConfig, own_attention: bool) -> Plan:
    """Choose the weight format and the runner for this model, these options and this processor."""
    if options.kv_cache_dtype == "int8":
        return _with_int8_cache(checkpoint, options, own_attention)
    chosen = _automatic if options.weights == "auto" else _as_requested
    found = chosen(checkpoint, options, own_attention)
    if options.kv_cache_dtype not in ("auto", found.kv_dtype):
        raise OptionError(
            f"kv_cache_dtype={options.kv_cache_dtype!r} is not possible here: the runner would be "
            f"{found.runner}, which stores keys and values in {found.kv_dtype}."
        )
    return found


def _with_int8_cache(checkpoint: Checkpoint, options: EngineConfig, own_attention: bool) -> Plan:
    """Choose the compiled step with an int8 KV cache, which `make_runner` compiles if needed."""
    automatic = options.weights == "auto"
    form = stored_form(checkpoint) if automatic else options.weights
    obstacle = _obstacle(checkpoint, options, own_attention, form)
    if obstacle is not None:
        raise OptionError(f"kv_cache_dtype='int8' needs the compiled step, but {obstacle}.")
    reason = "auto: as stored" if automatic else "as requested"
    return replace(_plan(form, reason, None), kv_dtype="int8")


def _as_requested(checkpoint: Checkpoint, options: EngineConfig, own_attention: bool) -> Plan:
    form = options.weights
    if form in ("int8", "int4") and not has_numba():
        raise OptionError(f"weights={form!r} needs Numba's kernels. {_NO_NUMBA}.")
    obstacle = _obstacle(checkpoint, options, own_attention, form)
    if obstacle is None and form == "bfloat16":
        obstacle = _not_compiled(form)
    return _plan(form, "as requested", obstacle)


def _automatic(checkpoint: Checkpoint, options: EngineConfig, own_attention: bool) -> Plan:
    form = stored_form(checkpoint)
    torch_form = "bfloat16" if multiplies_bfloat16() else "float32"
    obstacle = _obstacle(checkpoint, options, own_attention, form)
    obstacle = obstacle or _not_compiled(form) or _slower_than_torch(form, torch_form)
    if obstacle is None:
        return _plan(form, "auto: as stored, the fastest on this processor", None)
    if torch_form == "bfloat16":
        return _plan("bfloat16", "auto: this processor has instructions for bfloat16", obstacle)
    return _plan("float32", "auto: this processor has no instructions for bfloat16", obstacle)


def _slower_than_torch(form: str, torch_form: str) -> str | None:
    """Return a message if the compiled step was slower than torch when it was compiled here."""
    from minigen.kernels.cpu.runner import speeds

    found = speeds(form)
    if found["compiled"] >= found[torch_form]:
        return None
    compiled, other = (f"{found[each] / 1e9:.1f}" for each in ("compiled", torch_form))
    return (
        f"its kernels multiply {compiled} billion {form} weights per second here, torch {other} "
        f"billion in {torch_form}"
    )


def stored_form(checkpoint: Checkpoint) -> str:
    """Return the smallest weight format that loses little or none of the file's precision."""
    sizes: dict[str, int] = {}
    for name, tensor in checkpoint.tensors.items():
        if ".layers." in name and len(tensor.shape) == 2:
            form = _STORED_AS.get(tensor.kind, "int8")
            sizes[form] = sizes.get(form, 0) + tensor.num_bytes
    return "int4" if set(sizes) == {"int4"} else "int8"


def _plan(form: str, form_reason: str, obstacle: str | None) -> Plan:
    if obstacle is None:
        return Plan(form, form_reason, True, "a whole step compiled by Numba", "bfloat16")
    kv_dtype = str(DTYPES[form]).removeprefix("torch.")
    return Plan(form, form_reason, False, f"torch, layer by layer ({obstacle})", kv_dtype)


def _obstacle(
    checkpoint: Checkpoint, options: EngineConfig, own_attention: bool, form: str
) -> str | None:
    """Return why the compiled step cannot run, or None if it can."""
    if form == "float32":
        return "the compiled step has no float32 weights"
    if options.tensor_parallel_size > 1:
        return f"the model is split over {options.tensor_parallel_size} processes"
    if not own_attention:
        return "an attention_backend was passed in"
    if not has_numba():
        return _NO_NUMBA
    from minigen.kernels.cpu.step import refusal

    return refusal(checkpoint.config, options.block_size)


def _not_compiled(form: str) -> str | None:
    from minigen.kernels.cpu.runner import is_compiled

    return None if is_compiled(form) else "its kernels are not compiled yet: minigen compile"


def has_numba() -> bool:
    """Return whether Numba is installed."""
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
    """Build the runner of the plan, with memory for `num_blocks` blocks of keys and values."""
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
    """Return the function that chooses tokens: compiled kernels if the plan has them, or torch."""
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
    from minigen.kernels.cpu.kv_layout import PackedKVPool
    from minigen.kernels.cpu.runner import CompiledRunner
    from minigen.kernels.cpu.step import kernel_shape, kernel_weights

    compile_step(chosen.form, chosen.kv_dtype)
    config = checkpoint.config
    shape = kernel_shape(config, options.block_size, num_blocks, chosen.kv_dtype)
    with memory_for(num_blocks, options.block_size):
        pool = PackedKVPool(shape, chosen.kv_dtype)
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
    """Return how to make linear layers, and how to convert an output head tied to the embedding."""
    if form in ("int8", "int4"):
        from minigen.kernels.cpu.linear import panel_linear

        return panel_linear(form, num_threads), lambda head: head
    if can_pack(DTYPES[form]):
        return packed_linear(DTYPES[form]), pack
    return dense_linear(DTYPES[form]), lambda head: head


@contextmanager
def memory_for(num_blocks: int, block_size: int) -> Iterator[None]:
    """Raise `OptionError` if the system refuses the memory for the KV cache."""
    try:
        yield
    except (OSError, OverflowError, ValueError) as error:
        raise OptionError(
            f"num_blocks {num_blocks} of {block_size} tokens each need more memory than "
            f"this machine can allocate: {error}."
        ) from error


@contextmanager
def one_thread() -> Iterator[None]:
    """Unpack weights with one torch thread.

    Threads gain little on many small operations. If another program keeps a core busy, their
    synchronisation makes the unpacking take twenty times as long.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
