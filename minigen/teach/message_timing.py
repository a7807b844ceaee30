"""Seconds of an all-reduce among processes of this machine, over gloo.

`time_all_reduces` starts the processes: `python -m minigen.teach.message_timing RANK RANKS MEETING
REPEATS BYTES...`, of which rank 0 prints what it measured.
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

from minigen.parallel.comm import Comm, local_comm
from minigen.parallel.workers import PACKAGES

SIZES = tuple(4**power for power in range(4, 12))  # 256 bytes to 4 MB
PATIENCE = 100.0  # seconds, for all of it


def time_all_reduces(
    num_ranks: int, sizes: Sequence[int] = SIZES, repeats: int = 30
) -> dict[int, float]:
    """Seconds of an all-reduce that little disturbed, by the bytes of its tensor.

    Raises `subprocess.SubprocessError` if the processes fail, or come to no end.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "minigen.teach.message_timing"]
        asked = [str(Path(folder) / "meeting"), str(repeats), *map(str, sizes)]
        ranks = [[*command, str(rank), str(num_ranks), *asked] for rank in range(num_ranks)]
        paths = os.pathsep.join([str(PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": paths}
        others = [
            subprocess.Popen(each, env=environment, stderr=subprocess.DEVNULL) for each in ranks[1:]
        ]
        try:
            done = subprocess.run(
                ranks[0], env=environment, capture_output=True, timeout=PATIENCE, check=True
            )
        finally:
            for other in others:
                other.kill()
                other.wait()
    return {int(size): seconds for size, seconds in json.loads(done.stdout).items()}


def seconds_by_bytes(comm: Comm, sizes: Sequence[int], repeats: int) -> dict[int, float]:
    """What each size takes this rank, of which one in ten takes less; all ranks call it.

    Twice unmeasured before each size.
    """
    found = {}
    for num_bytes in sizes:
        x, seconds = torch.zeros(num_bytes // 4), []
        for _ in range(repeats + 2):
            begun = time.perf_counter()
            comm.all_reduce(x)
            seconds.append(time.perf_counter() - begun)
        found[num_bytes] = sorted(seconds[2:])[repeats // 10]
    return found


def main() -> None:
    """Be a rank."""
    rank, num_ranks, meeting, repeats, *sizes = sys.argv[1:]
    torch.set_num_threads(1)
    comm = local_comm(int(rank), int(num_ranks), Path(meeting))
    found = seconds_by_bytes(comm, [int(each) for each in sizes], int(repeats))
    if comm.rank == 0:
        print(json.dumps(found), flush=True)
    os._exit(0)  # gloo's threads may be in the middle of something, and would abort it


if __name__ == "__main__":
    main()
