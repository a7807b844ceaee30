"""Measure the seconds of an all-reduce between processes on this machine, over gloo.

`time_all_reduces` starts the processes: `python -m` this module `RANK GROUPS FOLDER REPEATS
BYTES...`. Rank 0 prints the measurements. GROUPS are numbers of ranks, as in 3,2.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from minigen.child_process import environment
from minigen.parallel.comm import Comm, GroupComm, local_comm

SIZES = tuple(4**power for power in range(4, 12))  # 256 bytes to 4 MB
TIMEOUT = 100.0  # seconds for the whole measurement


def time_all_reduces(
    groups: Sequence[int], sizes: Sequence[int] = SIZES, repeats: int = 30
) -> dict[int, dict[int, float]]:
    """Return the seconds of an all-reduce with little disturbance, by number of ranks and bytes.

    The same processes are the ranks of all groups; the largest group is measured first. Raises
    `subprocess.SubprocessError` if they fail, or do not end within `TIMEOUT`.
    """
    ordered = sorted(groups, reverse=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "minigen_course.ch41_tensor_parallel.message_timing"]
        asked = [",".join(map(str, ordered)), folder, str(repeats), *map(str, sizes)]
        ranks = [[*command, str(rank), *asked] for rank in range(ordered[0])]
        others = [
            subprocess.Popen(
                each, env=environment(), stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            for each in ranks[1:]
        ]
        try:
            done = subprocess.run(
                ranks[0], env=environment(), capture_output=True, timeout=TIMEOUT, check=True
            )
        finally:
            for other in others:
                other.kill()
                other.communicate()
    found = json.loads(done.stdout)
    return {group: {size: found[str(group)][str(size)] for size in sizes} for group in groups}


def seconds_by_bytes(comm: Comm, sizes: Sequence[int], repeats: int) -> dict[int, float]:
    """Return the 10th percentile of the seconds for each size on this rank; all ranks call it.

    Two all-reduces of each size run first as a warm-up.
    """
    found = {}
    for num_bytes in sizes:
        x, seconds = torch.zeros(num_bytes // 4), []
        for _ in range(repeats + 2):
            started = time.perf_counter()
            comm.all_reduce(x)
            seconds.append(time.perf_counter() - started)
        found[num_bytes] = sorted(seconds[2:])[repeats // 10]
    return found


def main() -> None:
    """Run as one rank of each group that is large enough to have it."""
    rank, groups, folder, repeats, *sizes = sys.argv[1:]
    torch.set_num_threads(1)
    own = [each for each in map(int, groups.split(",")) if int(rank) < each]
    comms: list[GroupComm] = []  # kept to the end, because other ranks may still use them
    found = {}
    for num_ranks in own:
        comms.append(local_comm(int(rank), num_ranks, Path(folder) / f"rendezvous-{num_ranks}"))
        found[num_ranks] = seconds_by_bytes(comms[-1], [int(each) for each in sizes], int(repeats))
    if int(rank) == 0:
        print(json.dumps(found), flush=True)
    else:
        sys.stdin.buffer.read()  # until the parent process ends this one, or exits
    os._exit(0)  # gloo's threads may still be busy, and would abort the exit


if __name__ == "__main__":
    main()
