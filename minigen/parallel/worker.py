"""`python -m minigen.parallel.worker RANK RANKS RENDEZVOUS`: a worker, which ends with rank 0.

`minigen.parallel.launch` starts it. Its output goes to a log file that rank 0 reads if this process
ends unexpectedly.
"""

import os
import shutil
import sys
import time
from pathlib import Path
from threading import Thread

from minigen.child_process import wait_for_starter
from minigen.errors import WorkerError
from minigen.parallel.comm import local_comm
from minigen.parallel.launch import LOST_ANOTHER, exit_process, run_worker

_LOOK_SECONDS = 0.2


def main() -> None:
    """Run a worker. It exits with status 0 as soon as rank 0 ends, even in the middle of a step."""
    rank, num_ranks, rendezvous = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    folder = rendezvous.parent
    watchers = (
        Thread(target=_end_with_rank_0, args=[folder], daemon=True),
        Thread(target=_end_with_parent, args=[os.getppid(), folder], daemon=True),
    )
    for each in watchers:
        each.start()
    try:
        run_worker(local_comm(rank, num_ranks, rendezvous))
    except WorkerError as error:
        print(error, file=sys.stderr, flush=True)
        for each in watchers:  # if rank 0 has ended, one of them ends this process
            each.join(2 * _LOOK_SECONDS)
        os._exit(LOST_ANOTHER)
    exit_process()


def _end_with_rank_0(folder: Path) -> None:
    wait_for_starter()
    _end(folder)


def _end_with_parent(parent: int, folder: Path) -> None:
    """End when rank 0 has ended, although a process that it forked still has the pipe's end."""
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    _end(folder)


def _end(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # rank 0 may have been killed
    os._exit(0)


if __name__ == "__main__":
    main()
