"""Times of single steps of a loaded engine, and of their parts, to predict the steps from.

Every time is the median of several, so that ceilings and steps are treated alike. The ceilings are
measured again before and after each step, because other programs change them within seconds.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import numpy as np
from numba import njit, prange, set_num_threads
from step_cost import (
    BFLOAT16,
    Ceilings,
    Point,
    Weights,
    decode_work,
    predicted_seconds,
)

from minigen.kernels.cpu.arrays.inputs import quantized, rounded
from minigen.kernels.cpu.arrays.step_arrays import product_scratch
from minigen.kernels.cpu.elementwise import prepare
from minigen.kernels.cpu.linear import multiply
from minigen.kernels.cpu.packed_weights import GROUP, PackedWeights, Pairs
from minigen.kernels.cpu.runner import CompiledRunner
from minigen.kernels.cpu.simd import kernel
from minigen.kernels.cpu.team import one_at_a_time, pool_of_one, team_of
from minigen.kernels.cpu.thread_pool import join_step, leave_step
from minigen.kv_cache.block_manager import BlockManager
from minigen.llm import LLM
from minigen.sampling.params import SamplingParams
from minigen.sequence import ScheduledChunk, Sequence
from minigen_course.lab.cost_model import ModelShape

PEAK_TOKENS = 256  # large enough that loading packed weights from memory does not matter
_KINDS = {"Codes4": "int4", "Codes8": "int8", "Pairs": BFLOAT16}
_numbers = count(1)


def median_seconds(run: Callable[[], object], least: int, seconds: float = 0.0) -> float:
    """Return the median time of at least `least` runs within `seconds`, after one uncounted run."""
    run()
    found: list[float] = []
    while len(found) < least or (sum(found) < seconds and len(found) < 20 * least):
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def compiled_runner(llm: LLM) -> CompiledRunner:
    """Return the engine's runner; raises `TypeError` if that is not the compiled one."""
    runner = llm.engine.runner
    if not isinstance(runner, CompiledRunner):
        raise TypeError(
            f"Only steps of the compiled runner can be timed, not those of {llm.describe()}."
        )
    return runner


@njit(parallel=True, fastmath=True)
def _sum(numbers):  # type: ignore[no-untyped-def]
    total = np.float32(0.0)
    for index in prange(len(numbers)):
        total += numbers[index]
    return total


class Probe:
    """Measures this machine's ceilings repeatedly, each time in a few tenths of a second.

    The bandwidth is that of a sum over `megabytes`, more than most caches hold. A peak is that of a
    product of `PEAK_TOKENS` tokens with `hidden` rows of an engine's weights, few enough for the
    cache.
    """

    def __init__(self, llm: LLM, megabytes: int = 256):
        runner = compiled_runner(llm)
        self.num_threads = runner.num_threads
        self._numbers = np.ones(megabytes * 2**20 // 4, np.float32)
        shape, weights = runner.shape, runner.weights
        self._size = 2.0 * PEAK_TOKENS * shape.hidden
        self._products = {
            kind_of(panels): (self._product(panels, columns, shape.hidden), columns)
            for panels, columns in (
                (weights.head, shape.hidden),
                (weights.down, shape.ffn),
                (Pairs(_bfloat16(shape.hidden * shape.ffn)[None]), shape.ffn),
            )
        }

    def ceilings(self) -> Ceilings:
        """Measure the present ceilings."""
        with one_at_a_time():
            set_num_threads(self.num_threads)
            seconds = median_seconds(lambda: _sum(self._numbers), 5)
        peaks = {
            kind: self._size * columns / median_seconds(run, 15)
            for kind, (run, columns) in self._products.items()
        }
        return Ceilings(self._numbers.nbytes / seconds, peaks)

    def _product(self, panels: PackedWeights, columns: int, rows: int) -> Callable[[], None]:
        """Return a product with the first rows of the first layer's weights."""
        inputs, out = (
            _inputs(panels, PEAK_TOKENS, columns),
            np.empty(PEAK_TOKENS * rows, np.float32),
        )
        sizes = (1, (columns // GROUP,), (rows,))
        room = product_scratch(isinstance(panels, Pairs), columns // GROUP, self.num_threads)
        return lambda: team_of(self.num_threads).run(
            1, _multiply_layers, (panels,), *sizes, inputs, PEAK_TOKENS, out, room
        )


def _inputs(panels: PackedWeights, tokens: int, columns: int) -> Any:
    inputs: Any = (rounded if isinstance(panels, Pairs) else quantized)(tokens, columns)
    prepare(pool_of_one(), _normal(tokens * columns), tokens, columns, inputs)
    return inputs


@partial(kernel, nogil=True)
def _multiply_layers(  # type: ignore[no-untyped-def]
    pool, step, matrices, num_layers, groups, widths, inputs, tokens, out, room
):
    if join_step(pool, step):
        for layer in range(num_layers):
            for which in range(len(matrices)):
                weights, width = matrices[which], widths[which]
                multiply(
                    pool, weights, layer, inputs, tokens, groups[which], out, width, False, room
                )
        leave_step(pool)


def product_seconds(llm: LLM, tokens: int) -> float:
    """Return the median time of a step's products alone, for `tokens` tokens."""
    runner = compiled_runner(llm)
    shape, weights = runner.shape, runner.weights
    heads = shape.q_heads * shape.head_dim
    columns = (shape.hidden, heads, shape.hidden, shape.ffn)
    widths = (
        heads + 2 * shape.kv_heads * shape.head_dim,
        shape.hidden,
        2 * shape.ffn,
        shape.hidden,
    )
    groups = tuple(each // GROUP for each in columns)
    inputs = _inputs(weights.down, tokens, max(columns))
    out = np.empty(tokens * max(*widths, shape.vocab), np.float32)
    matrices = (weights.qkv, weights.out, weights.gate_up, weights.down)
    in_bfloat16 = isinstance(weights.qkv, Pairs)
    room = product_scratch(in_bfloat16, max(groups), runner.num_threads)

    def run() -> None:
        team.run(
            len(matrices) * shape.layers,
            *(_multiply_layers, matrices, shape.layers, groups, widths, inputs, tokens, out, room),
        )
        team.run(
            1,
            *(_multiply_layers, (weights.head,), 1, groups[:1], (shape.vocab,)),
            *(inputs, tokens, out, room),
        )

    team = team_of(runner.num_threads)
    return median_seconds(run, 7, 0.3)


def kind_of(panels: PackedWeights) -> str:
    """Return the format of packed weights."""
    return _KINDS[type(panels).__name__]


def weights_of(llm: LLM) -> tuple[Weights, ...]:
    """Return the weights that a step of this engine reads, whatever its batch."""
    weights = compiled_runner(llm).weights
    shape = ModelShape.of(llm.config)
    layers = (weights.qkv, weights.out, weights.gate_up, weights.down)
    head = shape.vocab * shape.hidden
    layers_bytes = sum(field.nbytes for panels in layers for field in panels)
    head_bytes = sum(field.nbytes for field in weights.head)
    return (
        Weights("layers", kind_of(weights.qkv), layers_bytes, shape.multiplied - head),
        Weights("head", kind_of(weights.head), head_bytes, head),
    )


def fill_cache(llm: LLM) -> None:
    """Fill the keys and values of all blocks with random numbers, which do not affect the time."""
    blocks = compiled_runner(llm).pool.blocks
    blocks[:] = _bfloat16(2 * blocks.shape[-1])


def decode_seconds(llm: LLM, sequences: int, context: int) -> float:
    """Return the median time of `runner.logits` for one new token of each of `sequences`.

    Each sequence then has `context` tokens, in its own blocks. The same step runs repeatedly.
    Raises `ValueError` if the engine has too few rows or blocks.
    """
    runner = compiled_runner(llm)
    with running_chunks(runner.manager, sequences, context) as chunks:
        return median_seconds(lambda: runner.logits(chunks), 7, 0.5)


def beside(probe: Probe, run: Callable[[], float]) -> tuple[float, Ceilings]:
    """Return the result of `run`, and the mean of the ceilings before and after it."""
    before, found, after = probe.ceilings(), run(), probe.ceilings()
    peaks = {kind: (peak + after.peaks[kind]) / 2 for kind, peak in before.peaks.items()}
    return found, Ceilings((before.bandwidth + after.bandwidth) / 2, peaks)


def measure_point(llm: LLM, probe: Probe, sequences: int, context: int) -> Point:
    """Measure the time of a step, with its prediction."""
    seconds, ceilings = beside(probe, lambda: decode_seconds(llm, sequences, context))
    work = decode_work(weights_of(llm), ModelShape.of(llm.config), sequences, context)
    return Point(sequences, context, seconds, predicted_seconds(work, ceilings))


def measure_products(llm: LLM, probe: Probe, sequences: int) -> Point:
    """Measure the time of a step's products alone, with its prediction; its context is 0."""
    seconds, ceilings = beside(probe, lambda: product_seconds(llm, sequences))
    products = decode_work(weights_of(llm), ModelShape.of(llm.config), sequences, 0)
    return Point(sequences, 0, seconds, predicted_seconds(products, ceilings))


@contextmanager
def running_chunks(
    manager: BlockManager, sequences: int, context: int, new: int = 1
) -> Iterator[list[ScheduledChunk]]:
    """Yield chunks of `new` tokens, one per sequence; each sequence has `context` tokens with them.

    All earlier tokens count as computed. Raises `ValueError` if there are too few rows or blocks.
    """
    greedy, allocated = SamplingParams(temperature=0.0), []
    try:
        for _ in range(sequences):
            number = next(_numbers)
            prompt = tuple(1000 + (number * 31 + index) % 5000 for index in range(context))
            sequence = Sequence(
                -number, prompt, greedy, 0, 1, frozenset(), cache_salt=f"timing {number}"
            )
            if manager.allocate(sequence, context) < context:
                raise ValueError(
                    f"Too few rows or blocks for {sequences} sequences of {context} tokens."
                )
            allocated.append(sequence)
            sequence.num_computed = context - new
        yield [ScheduledChunk(sequence, new) for sequence in allocated]
    finally:
        for sequence in allocated:
            manager.free(sequence)


def _normal(size: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(size, np.float32)


def _bfloat16(size: int) -> Any:
    """Return random numbers in bfloat16, two per word."""
    return (_normal(size).view(np.uint32) >> 16).astype(np.uint16).view(np.int32)
