"""The time of a step by operator: before, with torch's layers one by one; after, with the kernels.

Before: self time of torch's operators, from torch's own profiler, in bfloat16; the rest of a step
is Python and dispatch. After: each operator of the compiled step alone, for all layers, by the
threads that run steps, and the whole step. Weights are read from memory in both.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from common import json_option, write_results
from rich.console import Console
from rich.progress import track
from rich.table import Table
from step_timing import compiled_runner, fill_cache, median_seconds, running_chunks
from torch.profiler import ProfilerActivity, profile

from minigen import LLM
from minigen.hardware import torch_threads
from minigen.kernels.cpu.arrays.step_arrays import num_phases
from minigen.kernels.cpu.attention import attend, rotate_and_store
from minigen.kernels.cpu.compile import compile_step
from minigen.kernels.cpu.elementwise import normalize, prepare
from minigen.kernels.cpu.linear import multiply, multiply_and_gate
from minigen.kernels.cpu.runner import CompiledRunner
from minigen.kernels.cpu.simd import kernel
from minigen.kernels.cpu.team import team_of
from minigen.kernels.cpu.thread_pool import join_step, leave_step
from minigen.kv_cache.paged import attend_paged
from minigen.sequence import ScheduledChunk

FORMS = ("bfloat16", "int8", "int4")
STEPS = {  # sequences, context, new tokens per sequence
    "decode, 1 sequence": (1, 64, 1),
    "decode, 32 sequences": (32, 64, 1),
    "decode, 16 sequences of 2,048": (16, 2048, 1),
    "prompt of 512": (1, 512, 512),
}
PARTS = ("norms", "qkv", "rotary, store", "attention", "prepare", "out", "gate, up", "down", "head")
REPEATS, BLOCK_SIZE = 9, 16


@partial(kernel, nogil=True)
def run_part(pool, step, part, shape, model, windows, packed, cache, scratch, work, logits):
    """Run one operator of a step, for all layers, as `run_layers` calls it."""
    if join_step(pool, step):
        tokens, hidden, groups = len(packed.token_ids), shape.hidden, shape.hidden // 32
        heads, eps = shape.q_heads * shape.head_dim, shape.norm_eps
        width = heads + 2 * shape.kv_heads * shape.head_dim
        room = work.products
        for layer in range(shape.layers):
            if part == 0:
                normalize(
                    pool, work.x, tokens, hidden, model.attention_norm[layer], eps, work.inputs
                )
                normalize(pool, work.x, tokens, hidden, model.ffn_norm[layer], eps, work.inputs)
            elif part == 1:
                multiply(
                    pool, model.qkv, layer, work.inputs, tokens, groups, work.qkv, width, False,
                    room,
                )  # fmt: skip
            elif part == 2:
                rotate_and_store(
                    pool, shape, layer, model.heads, packed, tokens, work.qkv, cache, scratch
                )
            elif part == 3:
                attend(
                    pool, shape, layer, windows[layer], packed, cache, scratch, work.attention_out
                )
            elif part == 4:
                prepare(pool, work.attention_out, tokens, heads, work.inputs)
            elif part == 5:
                multiply(
                    pool, model.out, layer, work.inputs, tokens, heads // 32, work.x, hidden, True,
                    room,
                )  # fmt: skip
            elif part == 6:
                multiply_and_gate(
                    pool, model.gate_up, layer, work.inputs, tokens, groups, shape.ffn,
                    work.ffn_inputs, room,
                )  # fmt: skip
            elif part == 7:
                multiply(
                    pool, model.down, layer, work.ffn_inputs, tokens, shape.ffn // 32, work.x,
                    hidden, True, room,
                )  # fmt: skip
        if part == 8:
            rows = len(packed.logits_rows)
            multiply(
                pool, model.head, 0, work.inputs, rows, groups, logits, shape.vocab, False, room
            )
        leave_step(pool)


def compiled_parts(llm: LLM, chunks: list[ScheduledChunk]) -> dict[str, Any]:
    """Return milliseconds of each operator alone, by turns, and of the whole step."""
    runner = compiled_runner(llm)
    packed, team = runner.packer.pack(chunks), team_of(runner.num_threads)
    logits = np.empty(len(packed.logits_rows) * runner.shape.vocab, np.float32)
    given = (
        *(runner.shape, runner.weights, runner._windows, packed),
        *(runner.pool.cache, runner._scratch, runner._work, logits),
    )
    numbers = np.random.default_rng(0).standard_normal(len(runner._work.x), np.float32)

    def run(part: int) -> Callable[[], None]:
        return lambda: team.run(num_phases(runner.shape), run_part, part, *given)

    taken: dict[str, list[float]] = {name: [] for name in (*PARTS, "whole step")}
    for _ in range(REPEATS):
        for part, name in enumerate(PARTS):
            runner._work.x[:] = numbers
            taken[name].append(median_seconds(run(part), 1))
        taken["whole step"].append(median_seconds(lambda: runner.run(packed, logits), 1))
    return {name: 1e3 * statistics.median(seconds) for name, seconds in taken.items()}


def torch_parts(llm: LLM, chunks: list[ScheduledChunk]) -> dict[str, Any]:
    """Return milliseconds of the slowest operators, of the others, and of the whole step."""
    runner = llm.engine.runner
    runner.logits(chunks)
    whole = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        runner.logits(chunks)
        whole.append(1e3 * (time.perf_counter() - started))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(REPEATS):
            runner.logits(chunks)
    own = {each.key: each.self_cpu_time_total / 1e3 / REPEATS for each in profiled.key_averages()}
    most = sorted(own, key=lambda name: -own[name])[:8]
    calls = sum(each.count for each in profiled.key_averages()) / REPEATS
    return {
        **{name: own[name] for name in most},
        "other operators": sum(own.values()) - sum(own[name] for name in most),
        "whole step, not profiled": statistics.median(whole),
        "calls of operators": calls,
    }


def layers(pool: Any, batch: Any, windows: Any) -> Any:
    """Call minigen's attention in torch; as a custom function it makes layers run one by one."""
    return attend_paged(pool, batch, windows)


def load(weights: str, **options: Any) -> LLM:
    most = max(sequences * context for sequences, context, _ in STEPS.values())
    return LLM.load(
        weights=weights,
        max_num_seqs=max(sequences for sequences, _, _ in STEPS.values()),
        max_num_batched_tokens=512,
        block_size=BLOCK_SIZE,
        num_blocks=most // BLOCK_SIZE,
        enable_prefix_caching=False,
        **options,
    )


def profiled(
    name: str, llm: LLM, parts: Callable[[LLM, list[ScheduledChunk]], Any]
) -> dict[str, Any]:
    found = {}
    for step, (sequences, context, new) in track(STEPS.items(), name):
        with running_chunks(llm.engine.runner.manager, sequences, context, new) as chunks:
            found[step] = parts(llm, chunks)
    return found


def shown(name: str, found: dict[str, dict[str, float]]) -> Table:
    """Return a table of operators by steps, in milliseconds."""
    table = Table("ms", *found, title=name)
    for row in dict.fromkeys(row for column in found.values() for row in column):
        table.add_row(
            row, *(f"{column[row]:.2f}" if row in column else "" for column in found.values())
        )
    return table


def main() -> None:
    """Measure, print, and write JSON if a file was given."""
    file = json_option()
    results = {}
    eager = load("bfloat16", attention_backend=layers)
    assert not isinstance(eager.engine.runner, CompiledRunner)
    torch.set_num_threads(torch_threads())
    results["before: torch, bfloat16"] = profiled("torch", eager, torch_parts)
    for form in FORMS:
        compile_step(form)
        llm = load(form)
        fill_cache(llm)
        results[f"after: {form}"] = profiled(form, llm, compiled_parts)
    for name, found in results.items():
        Console().print(shown(name, found))
    if file is not None:
        write_results(file, {"milliseconds": results})


if __name__ == "__main__":
    main()
