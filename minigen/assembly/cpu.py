"""Chooses the weight format and the runner on a CPU once, each choice with its reason.

Two runners give the same answers. The layer-by-layer runner is plain torch, and accepts an
attention function of the user. The compiled runner is a whole step in Numba, on the weights in
their stored format. It needs Numba, its machine code on disk, and a model whose sizes fit its
vectors.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from minigen.assembly.coded_cache import CODED, CodedCache
from minigen.assembly.cpu_kernels import (
    KernelSource,
    Obstacle,
    kernel_source,
    warn_of_slow_path,
)
from minigen.assembly.torch_layers import build_runner, memory_for, one_thread
from minigen.checkpoint.checkpoint import Checkpoint
from minigen.checkpoint.quantized.matrix import QuantizedTensor
from minigen.checkpoint.safetensors import StoredTensor
from minigen.config import EngineConfig
from minigen.engine.model_runner import AttentionBackend, BlockPool
from minigen.errors import OptionError
from minigen.hardware import multiplies_bfloat16
from minigen.kv_cache.block_manager import BlockManager
from minigen.kv_cache.paged import CPU, KVPool, attend_paged
from minigen.kv_cache.quantized import attend_coded
from minigen.model.layers import DenseLinear
from minigen.model.transformer import MakeLinear
from minigen.protocols import Linear, Runner
from minigen.sampling.sampler import Choose, choose_tokens
from minigen.sockets.resolve import build_part, find_part, name_of
from minigen.trace.events import Trace

if TYPE_CHECKING:
    from minigen.hub import Progress

# The data type that the layer-by-layer runner computes in, also that of its KV cache.
DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.float32,
    "int4": torch.float32,
}
_STORED_AS = {"Q4_0": "int4", "Q4_1": "int4", "Q8_0": "int8"}
_NO_NUMBA = "Numba is not installed: pip install 'minigen[cpu]'"


@dataclass(frozen=True)
class CpuPlan:
    """A `minigen.assembly.build.Plan` on the CPU, in one process or several.

    `attention` is the attention backend of the layer-by-layer runner.
    """

    checkpoint: Checkpoint
    options: EngineConfig
    attention: AttentionBackend
    form: str
    form_reason: str
    obstacle: str | None
    default_kv_bytes: int = 2**30

    @property
    def compiled(self) -> bool:
        """Whether a step is one compiled function."""
        return self.obstacle is None

    @property
    def runner(self) -> str:
        """What runs the model."""
        if self.compiled:
            return "a whole step compiled by Numba"
        return f"torch, layer by layer ({self.obstacle})"

    @property
    def kv_dtype(self) -> str:
        """The data type of keys and values."""
        if self.coded is not None:
            return self.options.kv_cache_dtype
        if not self.compiled:
            return str(DTYPES[self.form]).removeprefix("torch.")
        return "int8" if self.options.kv_cache_dtype == "int8" else "bfloat16"

    @property
    def coded(self) -> CodedCache | None:
        """The KV cache in codes, if the layer-by-layer runner has one."""
        if self.compiled or self.options.kv_cache_dtype not in CODED:
            return None
        return CodedCache(self.checkpoint.config, self.options, DTYPES[self.form])

    @property
    def kv_bytes(self) -> int:
        """The bytes of one token's key and value in one layer.

        In the compiled step's int8 each head's vector has a float32 scale. Each rank has at least
        one head.
        """
        if self.coded is not None:
            return self.coded.token_bytes
        config = self.checkpoint.config
        head_bytes = config.head_dim + 4
        if self.kv_dtype != "int8":
            head_bytes = config.head_dim * DTYPES[self.kv_dtype].itemsize
        return 2 * max(config.kv_heads, self.options.tensor_parallel_size) * head_bytes

    @property
    def kv_fixed_bytes(self) -> int:
        """The bytes of the KV cache that no block has."""
        return 0 if self.coded is None else self.coded.fixed_bytes

    @property
    def tokens_by(self) -> str:
        """What chooses the tokens."""
        return "Numba" if self.compiled else "torch"

    def describe(self) -> dict[str, str]:
        """Return what was chosen for each part, and why."""
        ranks = self.options.num_ranks
        by_layers = self.attention if self.coded is None else attend_coded
        attention = "paged, in the compiled step" if self.compiled else name_of(by_layers)
        if self.options.context_parallel_size > 1:
            attention = "a ring for the parts of a prompt, a merge for those of the cache"
        if self.compiled or self.form in ("int8", "int4"):
            from minigen.kernels.cpu.amx.scratch import instructions

            linear = f"Numba, weights packed in panels of sixteen rows, {instructions()}"
        else:
            from minigen.kernels.onednn import best_for

            linear, _ = best_for(DTYPES[self.form])
        return {
            "weights": f"{self.form} ({self.form_reason})",
            "runner": self.runner,
            **({"ranks": f"{ranks} processes, over gloo"} if ranks > 1 else {}),
            **self._describe_stages(),
            "linear": linear,
            "attention": attention,
            **({} if self.coded is None else {"kv memory": self.coded.describe()}),
        }

    def _describe_stages(self) -> dict[str, str]:
        """Return the layers of each stage of a pipeline, and the micro-batches of a step."""
        num_stages = self.options.pipeline_parallel_size
        if num_stages == 1:
            return {}
        from minigen.parallel.pipeline import stage_layers

        dealt = self.options.num_layers_of_stages
        spans = stage_layers(self.checkpoint.config.num_layers, num_stages, dealt)
        layers = ", ".join(f"{each.start}-{each.stop - 1}" for each in spans)
        most = self.options.num_micro_batches or num_stages
        return {"stages": f"{num_stages}, layers {layers}; up to {most} micro-batches per step"}

    def chooser(self, num_threads: int) -> Choose:
        """Return the function that chooses tokens: compiled kernels with the step, or torch."""
        if not self.compiled:
            return choose_tokens
        from minigen.kernels.cpu.runner import KernelChooser

        return KernelChooser(self.checkpoint.config.vocab_size, num_threads)

    def build(
        self, manager: BlockManager, num_blocks: int, num_threads: int, trace: Trace
    ) -> tuple[Runner, Callable[[], Any]]:
        """Build the runner, with memory for `num_blocks` blocks, and what ends its processes."""
        if self.options.num_ranks > 1:
            return self._over_ranks(manager, num_blocks, num_threads, trace)
        build = self._compiled if self.compiled else self._by_layers
        return build(manager, num_blocks, num_threads), lambda: None  # no other process to end

    def close(self) -> None:
        """Do nothing: planning starts no process."""

    def _by_layers(self, manager: BlockManager, num_blocks: int, num_threads: int) -> Runner:
        config, options = self.checkpoint.config, self.options
        sizes = (config.kv_heads, options.block_size, config.head_dim, DTYPES[self.form])
        pool: BlockPool
        attention: Any
        with memory_for(num_blocks, options.block_size):
            if self.coded is not None:
                pool, attention = self.coded.pool(manager, num_blocks), attend_coded
            else:
                pool = KVPool(config.num_layers, num_blocks, *sizes)
                attention = self._checked(pool)
        where = (DTYPES[self.form], CPU, linears(self.form, num_threads), self.form)
        parts = (self.checkpoint, options, manager, num_threads, pool, attention)
        return build_runner(*parts, *where)

    def _checked(self, pool: KVPool) -> AttentionBackend:
        """Return the attention backend, in a wrapper that checks it if it is the user's."""
        if self.attention is attend_paged or self.options.attention_backend == "triton":
            return self.attention
        from minigen.sockets.checks_model import CheckedAttention

        return CheckedAttention(self.attention, pool, self.checkpoint.config.sliding_windows)

    def _compiled(self, manager: BlockManager, num_blocks: int, num_threads: int) -> Runner:
        from minigen.kernels.cpu.arrays.step_arrays import PackedModel, kernel_heads, kernel_shape
        from minigen.kernels.cpu.compile import compile_step
        from minigen.kernels.cpu.kv.layout import PackedKVPool
        from minigen.kernels.cpu.runner import CompiledRunner

        compile_step(self.form, self.kv_dtype)
        most = self.options.max_num_batched_tokens
        config, block_size = self.checkpoint.config, self.options.block_size
        shape = kernel_shape(config, block_size, num_blocks, self.kv_dtype)
        with memory_for(num_blocks, block_size):
            pool = PackedKVPool(shape, self.kv_dtype)
        tensors = self.checkpoint.tensors
        with one_thread():
            model = self.checkpoint.shared.get(
                self.form, lambda: PackedModel.of(config, tensors, self.form)
            )
            heads = kernel_heads(config, tensors, min(config.max_positions, manager.num_tokens))
        weights = model.weights._replace(heads=heads)
        windows = config.sliding_windows
        try:
            parts = (shape, weights, pool, manager, windows, most, num_threads, model)
            return CompiledRunner(*parts)
        except MemoryError:
            raise OptionError(
                f"A step of max_num_batched_tokens={most} tokens needs more memory than this "
                "machine can allocate; choose fewer."
            ) from None

    def _over_ranks(
        self, manager: BlockManager, num_blocks: int, num_threads: int, trace: Trace
    ) -> tuple[Runner, Callable[[], Any]]:
        """Start the other ranks, and return rank 0's runner and what ends the others."""
        from minigen.parallel.launch import Settings, start_driver

        options, path = self.options, str(self.checkpoint.path.resolve())
        num_stages = options.pipeline_parallel_size
        settings = Settings(
            path,
            self.form,
            options.block_size,
            num_blocks,
            num_threads,
            num_stages,
            options.num_micro_batches or num_stages,
            "context" if options.context_parallel_size > 1 else "tensor",
            options.num_layers_of_stages,
        )
        ranks, most = options.num_ranks, options.max_num_batched_tokens
        driver = start_driver(self.checkpoint, settings, ranks, manager, most, trace)
        return driver, driver.close


def plan(
    checkpoint: Checkpoint, options: EngineConfig, progress: "Progress | None" = None
) -> CpuPlan:
    """Choose the weight format and the runner for this model, these options and this processor.

    Kernels that the choice needs are compiled now, if `compile_kernels` allows it; `progress` gets
    lines of text about that.
    """
    attention, source = _attention(options), kernel_source(options, progress)
    form, reason, obstacle = _choose(checkpoint, options, attention is attend_paged, source)
    if obstacle is not None and obstacle.costs_speed and source.may_compile:
        warn_of_slow_path(
            f"torch runs this model layer by layer, several times slower than compiled kernels: "
            f"{obstacle.reason}."
        )
    why_not = None if obstacle is None else obstacle.reason
    found = CpuPlan(checkpoint, options, attention, form, reason, why_not)
    if options.kv_cache_dtype not in ("auto", found.kv_dtype):
        raise OptionError(
            f"kv_cache_dtype={options.kv_cache_dtype!r} is not possible here: the runner would be "
            f"{found.runner}, which stores keys and values in {found.kv_dtype}."
        )
    if options.num_ranks > 1 and found.form in ("int8", "int4"):
        from minigen.kernels.panel_linear import check_panels

        check_panels(_multiplied_matrices(checkpoint), found.form)  # before other ranks start
    if options.tensor_parallel_size > 1:
        from minigen.parallel.sharding import check_ranks

        ranks = options.tensor_parallel_size
        check_ranks(checkpoint.config, checkpoint.tensors, found.form, ranks)
    if options.pipeline_parallel_size > 1:
        from minigen.parallel.pipeline import check_stages

        num_stages, dealt = options.pipeline_parallel_size, options.num_layers_of_stages
        check_stages(checkpoint.config, num_stages, dealt)
    return found


def _attention(options: EngineConfig) -> AttentionBackend:
    """Return the attention backend: torch's, Triton's in its interpreter, or the user's."""
    if options.attention_backend == "triton":
        from minigen.assembly.cuda import interpreted_attention

        return interpreted_attention(options.weights)
    known = {"auto": attend_paged, "torch": attend_paged}
    found = find_part("attention_backend", options.attention_backend, known)
    instance: AttentionBackend = build_part("attention_backend", found)
    return instance


def _choose(
    checkpoint: Checkpoint, options: EngineConfig, own_attention: bool, source: KernelSource
) -> tuple[str, str, Obstacle | None]:
    """Return the weight format, the reason for it, and why the compiled step cannot run, if so."""
    automatic = options.weights == "auto"
    form = stored_form(checkpoint) if automatic else options.weights
    reason = f"auto: {how_kept(checkpoint, form)}" if automatic else "as requested"
    obstacle = _obstacle(checkpoint, options, own_attention, form)
    if options.kv_cache_dtype == "int8" and obstacle is None:
        source.prepare(form, "int8")
        return form, reason, None
    if options.kv_cache_dtype in CODED:
        _check_own(options, own_attention)
        no_cache = f"the compiled step has no KV cache in {options.kv_cache_dtype}"
        obstacle = obstacle or Obstacle(no_cache)
    if not automatic:
        if form in ("int8", "int4") and not has_numba():
            raise OptionError(f"weights={form!r} needs Numba's kernels. {_NO_NUMBA}.")
        if form == "bfloat16":
            obstacle = obstacle or source.obstacle(form)
        elif obstacle is None:
            source.prepare(form)
        return form, reason, obstacle
    torch_form = "bfloat16" if multiplies_bfloat16() else "float32"
    obstacle = obstacle or source.obstacle(form) or _slower_than_torch(form, torch_form)
    if obstacle is None:
        return form, f"{reason}, the fastest on this processor", None
    has = "has" if torch_form == "bfloat16" else "has no"
    return torch_form, f"auto: this processor {has} instructions for bfloat16", obstacle


def _check_own(options: EngineConfig, own_attention: bool) -> None:
    """Raise `OptionError` if something else than minigen's own attention reads the KV cache."""
    if own_attention and options.num_ranks == 1:
        return
    ranks = f"the model is split over {options.num_ranks} processes"
    obstacle = ranks if own_attention else "an attention_backend was passed in"
    raise OptionError(
        f"kv_cache_dtype={options.kv_cache_dtype!r} needs minigen's own attention in one process, "
        f"but {obstacle}."
    )


def _slower_than_torch(form: str, torch_form: str) -> Obstacle | None:
    """Return an obstacle if the compiled step was slower than torch when it was compiled here."""
    from minigen.kernels.jit.code_cache import speeds

    found = speeds(form)
    if found["compiled"] >= found[torch_form]:
        return None
    compiled, other = (f"{found[each] / 1e9:.1f}" for each in ("compiled", torch_form))
    return Obstacle(
        f"its kernels multiply {compiled} billion {form} weights per second here, torch {other} "
        f"billion in {torch_form}"
    )


def stored_form(checkpoint: Checkpoint) -> str:
    """Return the smallest weight format that loses little or none of the file's precision."""
    forms = {_form_of(each) for each in _layer_matrices(checkpoint)}
    return "int4" if forms == {"int4"} else "int8"


def _form_of(matrix: StoredTensor) -> str:
    """Return "int4" if the kernels multiply a matrix's own codes in 4 bits, else "int8"."""
    integers = matrix.integers()
    if integers is None or not has_numba():
        return _STORED_AS.get(matrix.kind, "int8")
    from minigen.kernels.cpu.packed_weights import keeps_codes

    return "int4" if keeps_codes(integers, "int4") else "int8"


def how_kept(checkpoint: Checkpoint, form: str) -> str:
    """Return how a format keeps the numbers of a checkpoint's layers."""
    if not has_numba():
        return "as stored"
    from minigen.kernels.cpu.packed_weights import keeps_codes, rounds_scales

    num_rounded, inexact = 0, False
    for matrix in _layer_matrices(checkpoint):
        if not isinstance(matrix, QuantizedTensor):
            num_rounded += _STORED_AS.get(matrix.kind) != form
            continue
        integers = matrix.integers()
        if integers is None or not keeps_codes(integers, form):
            num_rounded += 1
        elif rounds_scales(integers):
            inexact = True
    if num_rounded:
        return f"{num_rounded} matrices rounded to {form}"
    return "as stored, scales rounded to float16" if inexact else "as stored"


def _layer_matrices(checkpoint: Checkpoint) -> Iterator[StoredTensor]:
    for name, tensor in checkpoint.tensors.items():
        if ".layers." in name and len(tensor.shape) == 2:
            yield tensor


def _multiplied_matrices(checkpoint: Checkpoint) -> Iterator[StoredTensor]:
    yield from _layer_matrices(checkpoint)
    tied = checkpoint.config.tied_embeddings
    yield checkpoint.tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]


def _obstacle(
    checkpoint: Checkpoint, options: EngineConfig, own_attention: bool, form: str
) -> Obstacle | None:
    """Return why the compiled step cannot run, or None if it can."""
    if form == "float32":
        return Obstacle("the compiled step has no float32 weights")
    if options.num_ranks > 1:
        return Obstacle(f"the model is split over {options.num_ranks} processes")
    if not own_attention:
        return Obstacle("an attention_backend was passed in")
    if not has_numba():
        return Obstacle(_NO_NUMBA, costs_speed=True)
    from minigen.kernels.cpu.arrays.step_arrays import refusal

    refused = refusal(checkpoint.config, options.block_size)
    return None if refused is None else Obstacle(refused, costs_speed=True)


def has_numba() -> bool:
    """Return whether Numba is installed."""
    return find_spec("numba") is not None


def linears(form: str, num_threads: int) -> tuple[MakeLinear, Callable[[DenseLinear], Linear]]:
    """Return how to make linear layers, and how to convert an output head tied to the embedding."""
    if form in ("int8", "int4"):
        from minigen.kernels.panel_linear import panel_linear

        return panel_linear(form, num_threads), lambda head: head
    from minigen.kernels.onednn import best_for, finished_linear

    _, finish = best_for(DTYPES[form])
    return finished_linear(DTYPES[form], finish), finish
