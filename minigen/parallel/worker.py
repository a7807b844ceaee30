"""`python -m minigen.parallel.worker RANK RANKS MEETING`: one rank of a model, until rank 0 ends.

Started by `minigen.parallel.launch`, not by hand. What it writes goes to a file that rank 0 reads
if this process ends before its time.
"""

import os
import sys
from pathlib import Path
from threading import Thread

from minigen.errors import WorkerError
from minigen.parallel.comm import local_comm
from minigen.parallel.launch import LOST_ANOTHER, follow_lead, leave


def main() -> None:
    """Be a rank; ends with status 0 when rank 0 does, wherever this process is then."""
    rank, num_ranks, meeting = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    Thread(target=_end_with_rank_0, daemon=True).start()
    try:
        follow_lead(local_comm(rank, num_ranks, meeting))
    except WorkerError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(LOST_ANOTHER)
    leave()


def _end_with_rank_0() -> None:
    sys.stdin.buffer.read()  # nobody writes: it returns when the other end closes
    os._exit(0)


if __name__ == "__main__":
    main()
