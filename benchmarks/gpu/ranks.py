"""Measure a model that is split over ranks with a GPU each: a group of one rank, and of two.

`python -m benchmarks.gpu.ranks RANK FILE` is one of two ranks, which meet at the file. Every rank
runs an engine of its own: all see the same logits, so they schedule the same steps.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.engines import LLAMA_3_8B, Shape, greedy, make_engine, random_model, run
from benchmarks.gpu.timing import replayed, seconds
from minigen.kernels.triton.kernel_model import KernelModel
from minigen.parallel.comm import Comm, GroupComm
from minigen.parallel.gpu import SplitRanks, nccl_comm

NUM_RANKS = 2
MOST_SECONDS = 240
CONTEXT, ANSWER = 128, 400  # tokens
MESSAGES = (1, 16, 256, 4096)  # tokens in an all-reduce


def share_of(shape: Shape, num_ranks: int) -> Shape:
    """Return the shape of one rank's share; all numbers must be divisible."""
    return replace(
        shape,
        vocab=shape.vocab // num_ranks,
        q_heads=shape.q_heads // num_ranks,
        kv_heads=shape.kv_heads // num_ranks,
        ffn=shape.ffn // num_ranks,
    )


def random_share(shape: Shape, comm: Comm, max_positions: int, device: torch.device) -> KernelModel:
    """Return a rank's share of a model with random weights."""
    share = share_of(shape, comm.num_ranks)
    model = random_model(share, max_positions, device)
    return replace(model, ranks=SplitRanks(comm, shape.vocab, comm.rank * share.vocab))


def tokens_a_second(model: KernelModel, shape: Shape, count: int, answer: int = ANSWER) -> float:
    """Return the tokens per second of `count` sequences that decode together."""
    blocks = count * (CONTEXT + answer + 16) // 16
    engine = make_engine(model, shape, 1024, count, blocks)
    run(engine, [greedy(-1, [1] * CONTEXT, 4)])  # compile the kernels of a prefill
    sequences = [greedy(i, [i + 1] * CONTEXT, answer) for i in range(count)]
    for each in sequences:
        engine.add(each)
    while len(sequences[-1].output_ids) < 2:
        engine.step()
    done = sum(len(each.output_ids) for each in sequences)
    started = time.perf_counter()
    run(engine, [])
    spent = time.perf_counter() - started
    engine.runner.steps.release()  # before the group ends
    return (count * answer - done) / spent


def all_reduces(comm: Comm, hidden: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Return, by number of tokens, the seconds of an all-reduce and its bytes per second.

    Each is a captured one, as in a step. Of `n` bytes a rank of a ring of N sends 2 (N - 1) / N n.
    """
    found = {}
    for num_tokens in MESSAGES:
        x = torch.ones(num_tokens, hidden, dtype=torch.bfloat16, device=device)
        spent = seconds(replayed(lambda x=x: comm.all_reduce(x)))
        sent = 2 * (comm.num_ranks - 1) / comm.num_ranks * x.nbytes
        found[str(num_tokens)] = {
            "bytes": x.nbytes,
            "microseconds": 1e6 * spent,
            "sent_bytes_a_second": sent / spent,
        }
    return found


def group_of_one() -> dict[str, Any]:
    """Compare decoding with a group of one rank over NCCL with decoding without a group.

    The difference is what NCCL costs where no byte travels.
    """
    shape, device = replace(LLAMA_3_8B, layers=8), torch.device("cuda", 0)
    with tempfile.TemporaryDirectory() as folder:
        comm = nccl_comm(0, 1, f"{folder}/rendezvous")
        split = tokens_a_second(random_share(shape, comm, 1024, device), shape, 1)
        whole = tokens_a_second(random_model(shape, 1024, device), shape, 1)
    return {"tokens_a_second": split, "without_a_group": whole, "ratio": split / whole}


def two_gpus() -> dict[str, Any]:
    """Time Llama-3-8B's shape over two GPUs, and NCCL's all-reduces between them."""
    found = torch.cuda.device_count()
    if found < NUM_RANKS:
        return {"left out": f"two ranks need two GPUs, and torch finds {found}"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.gpu.ranks"]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), f"{folder}/rendezvous"],
                stdout=subprocess.PIPE,
                encoding="utf-8",
                cwd=Path(__file__).resolve().parents[2],
            )
            for rank in range(NUM_RANKS)
        ]
        try:
            said = [rank.communicate(timeout=MOST_SECONDS)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"the ranks ended with {[rank.returncode for rank in ranks]}")
    results: dict[str, Any] = json.loads(said[0].splitlines()[-1])
    return results


def as_rank(comm: Comm, device: torch.device) -> dict[str, Any]:
    """Measure as one of two ranks; both call this."""
    shape, share = LLAMA_3_8B, share_of(LLAMA_3_8B, comm.num_ranks)
    model = random_share(shape, comm, 1024, device)
    peer = 1 - comm.rank
    return {
        "peer_access": torch.cuda.can_device_access_peer(device.index, peer),
        "links": links(),
        "one_stream": tokens_a_second(model, share, 1),
        "64_streams": tokens_a_second(model, share, 64),
        "all_reduces": all_reduces(comm, shape.hidden, device),
    }


def links() -> str:
    """Return how GPU 0 is connected with GPU 1: "NV18" is 18 NVLinks, the others are PCIe."""
    try:
        command = ["nvidia-smi", "topo", "-m"]
        lines = subprocess.run(command, capture_output=True, encoding="utf-8").stdout.splitlines()
        (first,) = [line.split() for line in lines if line.startswith("GPU0")]
        return first[2]
    except (OSError, ValueError, IndexError) as error:
        return f"unknown: {error}"


if __name__ == "__main__":
    own = torch.device("cuda", int(sys.argv[1]))
    torch.cuda.set_device(own)
    group: GroupComm = nccl_comm(own.index, NUM_RANKS, sys.argv[2])
    print(json.dumps(as_rank(group, own)), flush=True)
    torch.cuda.synchronize()
    os._exit(0)  # NCCL's own end would wait for graphs that torch still holds
