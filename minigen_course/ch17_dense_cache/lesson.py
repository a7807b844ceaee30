"""Chapter 17 at work: generation with `DenseRunner` alone, and where the time of a step goes."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minigen.llm import LLM
from minigen.model.attention import attention
from minigen.model.layers import rms_norm, swiglu
from minigen.sampling.params import SamplingParams
from minigen.sequence import Sequence
from minigen_course.ch17_dense_cache import reference
from minigen_course.figures.show import best_seconds
from minigen_course.lab.cost_model import ModelShape, Step
from minigen_course.lab.inspect_model import transformer_of

FLOAT32 = 4  # bytes


@dataclass(frozen=True)
class StoredStep:
    """A decode step that a benchmark measured: its time, and that of reading its bytes alone."""

    seconds: float
    reading: float
    context: int


# Chapter 34's compiled step for one sequence, from benchmarks/results/34_step_cost.json.
# The bandwidth of `reading` was measured just before and just after the step.
COMPILED_STEP = StoredStep(seconds=9.70e-3, reading=8.36e-3, context=64)

CEILING = "the fastest of all reads: the ceiling"
LONG, SHORT = 4096, 576  # numbers in a row
NUMPY_LONG, NUMPY_SHORT, TORCH_LONG, TORCH_SHORT = PRODUCTS = (
    f"NumPy, rows of {LONG:,} numbers",
    f"NumPy, rows of {SHORT}",
    f"torch's linear layer, rows of {LONG:,}",
    f"torch's linear layer, rows of {SHORT}, as in this model",
)
WORK_MEGABYTES = 64  # a small matrix is read again and again, up to this many MB a round


def continue_dense(llm: LLM, prompt: str, num_tokens: int) -> list[int]:
    """Return the ids of the `num_tokens` tokens with which `DenseRunner` continues a prompt.

    Decoding is greedy, and does not stop at an end token.
    """
    model, config = transformer_of(llm), llm.config
    # Looked up at each call, so that `using` can replace the class with the learner's own.
    runner = reference.DenseRunner(
        model, config.kv_heads, config.sliding_windows, model.embedding.dtype
    )
    prompt_ids = tuple(llm.tokenizer.encode(prompt))
    sequence = Sequence(
        sequence_id=0,
        prompt_ids=prompt_ids,
        params=SamplingParams(temperature=0.0),
        seed=0,
        max_output=num_tokens,
        end_ids=frozenset(),
    )
    while len(sequence.output_ids) < num_tokens:
        next_id = int(torch.argmax(runner.logits([sequence])[0]))
        sequence.num_computed = len(sequence)
        sequence.append(next_id)
    return sequence.output_ids


def best_in_turns(runs: Mapping[str, Callable[[], object]], rounds: int = 10) -> dict[str, float]:
    """Return the least seconds of each function; they run in turns, after one warm-up round.

    So a busy moment of the machine hits all of them, and not one.
    """
    found = dict.fromkeys(runs, float("inf"))
    for number in range(rounds + 1):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            if number:
                found[name] = min(found[name], time.perf_counter() - started)
    return found


@torch.inference_mode()
def read_speeds(sizes: tuple[int, ...], rounds: int = 8) -> dict[str, list[float]]:
    """Return how fast matrices of `sizes` MB are read, in GB/s: the ceiling first, then `PRODUCTS`.

    A product has one vector. The ceiling of a size is the fastest of all reads of that size: the
    products, a sum, a maximum, and a product from the other side. Operations and sizes run in turns
    in every round, so that a busy moment hits all of them, and the fastest try of each counts.
    """
    numbers = torch.ones(max(sizes) * 10**6 // FLOAT32)
    fastest: dict[tuple[str, int], float] = {}
    for _ in range(rounds):
        for size in sizes:
            for name, (run, count) in _reads(numbers[: size * 10**6 // FLOAT32]).items():
                for _ in range(1 + WORK_MEGABYTES // size):
                    started = time.perf_counter()
                    run()
                    speed = count * FLOAT32 / (time.perf_counter() - started) / 1e9
                    fastest[name, size] = max(speed, fastest.get((name, size), 0.0))
    found = {name: [fastest[name, size] for size in sizes] for name in PRODUCTS}
    ceiling = [max(v for (_, of), v in fastest.items() if of == size) for size in sizes]
    return {CEILING: ceiling} | found


def _reads(numbers: torch.Tensor) -> dict[str, tuple[Callable[[], object], int]]:
    """Return operations that read `numbers`, and how many of them each reads."""
    found: dict[str, tuple[Callable[[], object], int]] = {
        "sum": (numbers.sum, len(numbers)),
        "maximum": (numbers.max, len(numbers)),
    }
    for width, by_numpy, by_torch in (
        (LONG, NUMPY_LONG, TORCH_LONG),
        (SHORT, NUMPY_SHORT, TORCH_SHORT),
    ):
        rows = numbers[: len(numbers) // width * width].view(-1, width)
        x, matrix, count = torch.ones(1, width), rows.numpy(), rows.numel()
        found[by_numpy] = partial(np.matmul, matrix, x[0].numpy()), count
        found[by_torch] = partial(torch.nn.functional.linear, x, rows), count
        if width == LONG:
            other_side = np.ones(len(matrix), np.float32)
            found["from the other side"] = partial(np.matmul, other_side, matrix), count
    return found


def products_of(llm: LLM, num_tokens: int) -> Callable[[], None]:
    """Return a function that runs the matrix products of a step on these tokens, and nothing else.

    The output head gets one token, as in a step.
    """
    model = transformer_of(llm)
    x = torch.ones(num_tokens, model.embedding.shape[1])
    mixed = torch.ones(num_tokens, model.layers[0].qkv.parts[0])
    gated = torch.ones(num_tokens, model.layers[0].gate_up.parts[0])

    @torch.inference_mode()
    def run() -> None:
        for layer in model.layers:
            layer.qkv(x)
            layer.out(mixed)
            layer.gate_up(x)
            layer.down(gated)
        model.head(x[-1:])

    return run


@torch.inference_mode()
def part_costs(llm: LLM, num_tokens: int, context: int) -> dict[str, tuple[Step, float]]:
    """Return what each part of a step reads and computes, in all layers, and its seconds.

    Each part runs alone, in float32, on the last `num_tokens` of `context` tokens. The output head
    gets one token, as in a step.
    """
    model, shape = transformer_of(llm), ModelShape.of(llm.config)
    layers, width = model.layers, shape.q_heads * shape.head_dim
    ids = torch.arange(1000, 1000 + num_tokens)
    x, mixed = torch.ones(num_tokens, shape.hidden), torch.ones(num_tokens, width)
    q = torch.ones(num_tokens, shape.q_heads, shape.head_dim)
    k = v = torch.ones(context, shape.kv_heads, shape.head_dim)
    pairs = sum(range(context - num_tokens + 1, context + 1))
    linears = shape.layers * shape.hidden * 2 * (width + shape.kv_heads * shape.head_dim)
    ffn, head = shape.layers * 3 * shape.hidden * shape.ffn, shape.vocab * shape.hidden
    norms = (2 * shape.layers + 1) * shape.hidden

    def attention_products() -> None:
        for layer in layers:
            layer.qkv(x)
            layer.out(mixed)

    def feed_forward() -> None:
        for layer in layers:
            layer.down(swiglu(*layer.gate_up(x).split(layer.gate_up.parts, dim=-1)))

    def all_norms() -> None:
        for layer in layers:
            rms_norm(x, layer.attention_norm, model.norm_eps)
            rms_norm(x, layer.ffn_norm, model.norm_eps)
        rms_norm(x, model.norm, model.norm_eps)

    costs: dict[str, tuple[Step, Callable[[], object]]] = {
        "embedding lookup": (
            Step(num_tokens * shape.hidden * FLOAT32, 0, 0),
            lambda: model.embed(ids),
        ),
        "norms": (
            Step((2 * num_tokens + 1) * norms * FLOAT32, 0, 4 * num_tokens * norms),
            all_norms,
        ),
        "attention's products": (
            Step(linears * FLOAT32, 0, 2 * num_tokens * linears),
            attention_products,
        ),
        "attention's context": (
            Step(0, shape.kv_numbers(context) * FLOAT32, 4 * shape.layers * width * pairs),
            lambda: [attention(q, k, v) for _ in layers],
        ),
        "feed-forward": (Step(ffn * FLOAT32, 0, 2 * num_tokens * ffn), feed_forward),
        "output head": (
            Step(head * FLOAT32, 0, 2 * head),
            lambda: model.head(x[-1:]),
        ),
    }
    return {name: (step, best_seconds(run, 2)) for name, (step, run) in costs.items()}


def operator_calls(run: Callable[[], object]) -> int:
    """Return how many torch operators a function calls."""
    calls = 0

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal calls
            calls += 1
            return func(*args, **(kwargs or {}))

    with Counting():
        run()
    return calls
