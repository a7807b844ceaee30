"""The work of a context that is divided over ranks: `python benchmarks/42_context.py`.

First counted: the pairs of query and key that each rank computes in each turn of the ring, in plain
and in zig-zag parts, and the messages and bytes of a layer. A turn takes as long as its busiest
rank, so the sum of the largest counts is the time of a prompt on as many devices, in pairs.

Then measured, in a layer with the heads of the default model, over processes of this machine with
one thread each: the CPU seconds that every rank computes in every turn. CPU seconds do not include
waiting, so they also hold where a machine has fewer cores than ranks; there is no time of a whole
prompt on several devices here. The outputs' distance from those of one process goes with them, in
float32 and float64, beside the bound on what the merges alone may add.

Last, one long prompt of the default model in float32, whole and with its context divided over two
processes, and the decode steps after it: on two cores the seconds of a step, and a rank's bytes of
the KV cache.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import json_option, random_prompts, write_results
from torch import Tensor

from minigen import LLM, SamplingParams
from minigen.child_process import environment
from minigen.model.attention import attention
from minigen.model.partial_attention import attend_part, merge_bound
from minigen.parallel.comm import Comm, MessageCounters, TracedComm, local_comm
from minigen.parallel.context import (
    Merged,
    Parts,
    most_rows,
    passed_round,
    plain_parts,
    prompt_tiles,
    split_attention,
    work_by_turn,
    zigzag_parts,
)
from minigen.trace.events import Event, EventKind, Trace
from minigen.trace.timeline import Timeline

DIVISIONS = {"plain": plain_parts, "zig-zag": zigzag_parts}
COUNTED_RANKS, MEASURED_RANKS = (2, 3, 4, 8), (2, 3, 4)
NUM_TOKENS = 4080  # of the ring: a multiple of 2, 4, 6, 8 and 16
CACHED = 8192  # tokens of the cache that a query's heads attend to
Q_HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
REPEATS = 5
PROMPT, STEPS = 1024, 20  # tokens of the model's prompt, and of its answer
PEER = "--peer"


def work_of(num_ranks: int) -> dict[str, Any]:
    """Return the pairs by turn and rank of both divisions, and what they would take."""
    found: dict[str, Any] = {}
    for name, divide in DIVISIONS.items():
        work = work_by_turn(divide(NUM_TOKENS, num_ranks))
        found[name] = {
            "pairs_by_turn_and_rank": work,
            "pairs_of_the_busiest_ranks": sum(map(max, work)),
        }
    busiest = [found[name]["pairs_of_the_busiest_ranks"] for name in DIVISIONS]
    found["plain_over_zigzag"] = busiest[0] / busiest[1]
    found["speedup_of_zigzag"] = NUM_TOKENS * (NUM_TOKENS + 1) / 2 / busiest[1]
    return found


def qkv(num_tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Return the same queries, keys and values in every process."""
    own = torch.Generator().manual_seed(42)
    heads = (Q_HEADS, KV_HEADS, KV_HEADS)
    wide = [
        torch.randn(num_tokens, each, HEAD_DIM, generator=own, dtype=torch.float64)
        for each in heads
    ]
    return [each.to(dtype) for each in wide]


def of_ring(comm: Comm, parts: Parts, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """Return this rank's CPU seconds by turn, its messages, and its error against one process."""
    q, k, v = qkv(NUM_TOKENS, dtype)
    places = torch.cat([torch.arange(run.start, run.stop) for run in parts[comm.rank]])
    places = torch.cat([places, places.new_zeros(most_rows(parts) - len(places))])
    tiles = prompt_tiles(parts, comm.rank)
    own = q[places]
    trace, counters, seconds = Trace(), MessageCounters(), []
    for repeat in range(repeats):
        if repeat == repeats - 1:
            trace.subscribe(Timeline(on_message=counters))
        merged, of_turns = Merged(own), []
        message = torch.stack([k[places], v[places]])
        for source, (keys, values) in passed_round(TracedComm(comm, trace), message):
            started = time.process_time()
            merged.add(keys, values, tiles[source])
            of_turns.append(time.process_time() - started)
        seconds.append(of_turns)
    error = (merged.output - attention(q, k, v)[places]).abs().max()
    return {
        "cpu_seconds_by_turn": [statistics.median(each) for each in zip(*seconds, strict=True)],
        "messages": counters.num_messages,
        "bytes": counters.num_bytes,
        "largest_error": float(error),
    }


def of_cache(comm: Comm, repeats: int) -> dict[str, Any]:
    """Return this rank's CPU seconds of a query over its part of a cache, and the messages."""
    q, k, v = qkv(CACHED, torch.float32)
    own = torch.arange(CACHED) % comm.num_ranks == comm.rank
    keys, values, seconds = k[own], v[own], []
    trace, counters = Trace(), MessageCounters()
    for repeat in range(repeats):
        if repeat == repeats - 1:
            trace.subscribe(Timeline(on_message=counters))
        started = time.process_time()
        part = attend_part(q[-1:], keys, values)
        seconds.append(time.process_time() - started)
        found = split_attention(TracedComm(comm, trace), part)
    return {
        "cpu_seconds": statistics.median(seconds),
        "messages": counters.num_messages,
        "bytes": counters.num_bytes,
        "largest_error": float((found - attention(q[-1:], k, v)).abs().max()),
    }


def as_rank(rank: int, num_ranks: int, folder: Path) -> None:
    """Measure as one rank of several processes, and write what was found into the folder."""
    torch.set_num_threads(1)
    comm = local_comm(rank, num_ranks, folder / "rendezvous")
    found: dict[str, Any] = {
        name: of_ring(comm, divide(NUM_TOKENS, num_ranks), torch.float32, REPEATS)
        for name, divide in DIVISIONS.items()
    }
    zigzag = zigzag_parts(NUM_TOKENS, num_ranks)
    found["zig-zag in float64"] = of_ring(comm, zigzag, torch.float64, 1)
    found["cache"] = of_cache(comm, 10 * REPEATS)
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    comm.all_reduce(torch.zeros(1))  # no rank ends while another one still reads from it


def measured(num_ranks: int) -> dict[str, Any]:
    """Return what the ranks measured, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, PEER]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(num_ranks), folder], env=environment(), cwd=Path.cwd()
            )
            for rank in range(num_ranks)
        ]
        try:
            if any(rank.wait(timeout=600) for rank in ranks):
                sys.exit(f"A rank of {num_ranks} failed.")
        finally:
            for rank in ranks:
                rank.kill()
        texts = [(Path(folder) / f"{rank}.json").read_text("utf-8") for rank in range(num_ranks)]
    return {str(rank): json.loads(text) for rank, text in enumerate(texts)}


def bounds() -> dict[str, float]:
    """Return the bound on what the merges add, by dtype, for values as large as these."""
    q, k, v = qkv(NUM_TOKENS, torch.float64)
    largest, most = float(attend_part(q, k, v).log_sum_exp.abs().max()), float(v.abs().max())
    merges = 2 * max(MEASURED_RANKS)  # two tiles per turn, at most
    return {
        str(dtype).removeprefix("torch."): most
        * merge_bound(2, merges, largest, torch.finfo(dtype).eps)
        for dtype in (torch.float32, torch.float64)
    }


def of_model(num_ranks: int) -> dict[str, Any]:
    """Time one prompt and the steps after it in float32; the messages and the cache's bytes."""
    llm = LLM.load(
        weights="float32",
        threads=num_ranks,
        context_parallel_size=num_ranks,
        enable_prefix_caching=False,
    )
    prompts: list[float] = []
    decodes: list[float] = []

    def look(event: Event) -> None:
        if event.kind is EventKind.STEP:
            seconds = event.counts["duration_ns"] / 1e9
            (prompts if event.counts["tokens"] == PROMPT else decodes).append(seconds)

    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
    counters = MessageCounters()
    timeline = Timeline(on_message=counters)
    with llm.trace.subscribed(look), llm.trace.subscribed(timeline):
        for seed in range(REPEATS):
            llm.generate(random_prompts(1, PROMPT, seed=seed), params, progress=False)
    config = llm.config
    token = 2 * config.num_layers * config.kv_heads * config.head_dim * 4
    llm.close()
    return {
        "prompt_seconds": statistics.median(prompts),
        "decode_step_seconds": statistics.median(decodes),
        "messages": counters.num_messages,
        "bytes": counters.num_bytes,
        "kv_bytes_per_token_and_rank": token // num_ranks,
    }


def main() -> None:
    """Count, measure, print, and write JSON if a file was given."""
    if sys.argv[1:2] == [PEER]:
        as_rank(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
        return
    path = json_option()
    work = {str(num_ranks): work_of(num_ranks) for num_ranks in COUNTED_RANKS}
    for num_ranks, found in work.items():
        print(
            f"{num_ranks} ranks: plain parts take {found['plain_over_zigzag']:.2f} times as long "
            f"as zig-zag ones, whose speedup is {found['speedup_of_zigzag']:.3f}"
        )
    rings = {str(num_ranks): measured(num_ranks) for num_ranks in MEASURED_RANKS}
    for num_ranks, ranks in rings.items():
        for name in DIVISIONS:
            turns = [each[name]["cpu_seconds_by_turn"] for each in ranks.values()]
            by_turn = [max(turn) for turn in zip(*turns, strict=True)]
            each = ", ".join(f"{1e3 * sum(seconds):.0f}" for seconds in turns)
            print(
                f"{num_ranks} ranks, {name}: {each} ms of CPU by rank, "
                f"{1e3 * sum(by_turn):.0f} ms of the busiest by turn"
            )
    steps = {f"{num_ranks} ranks": of_model(num_ranks) for num_ranks in (1, 2)}
    for name, found in steps.items():
        print(
            f"{name}: a prompt of {PROMPT} tokens {found['prompt_seconds']:.2f} s, "
            f"then {1e3 * found['decode_step_seconds']:.1f} ms a token"
        )
    if path is not None:
        settings = {
            "tokens": NUM_TOKENS,
            "cached_tokens": CACHED,
            "heads": [Q_HEADS, KV_HEADS, HEAD_DIM],
            "prompt": PROMPT,
            "repeats": REPEATS,
        }
        results = {"work": work, "ring": rings, "merge_bound": bounds(), "model": steps}
        write_results(path, {**results, "settings": settings})


if __name__ == "__main__":
    main()
