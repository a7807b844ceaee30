"""The processes of ranks 1 and up on this machine: started, watched, and ended with rank 0.

Each is `python -m minigen.parallel.worker`, never a fork or a copy of the caller's `__main__`. A
worker's stdin is a pipe without data: when rank 0 ends, in whatever way, it closes, and the worker
ends, too.
"""

import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from minigen.child_process import start_module
from minigen.errors import WorkerError

LOST_ANOTHER = 3  # the exit status of a worker that ended because another did
_GRACE = 1.0  # seconds in which a process that has ended is seen to have done so


class Workers:
    """Processes for the ranks 1 to `num_ranks - 1`, who meet rank 0 at the file `meeting`."""

    def __init__(self, num_ranks: int):
        self.num_ranks = num_ranks
        self._folder = Path(tempfile.mkdtemp(prefix="minigen-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(1, num_ranks):
                self._processes.append(self._start(rank))
        except BaseException:
            self.close()
            raise

    @property
    def meeting(self) -> Path:
        """Where the ranks find each other."""
        return self._folder / "meeting"

    @property
    def process_ids(self) -> list[int]:
        """Of ranks 1 and up, in order."""
        return [process.pid for process in self._processes]

    def check(self, error: WorkerError | None = None) -> None:
        """Raises `WorkerError` if a worker has ended, and ends the others.

        With an `error` that rank 0 had, wait a moment for the one that ended and caused it; if
        none did, it is rank 0's own, and the end of all as well.
        """
        deadline = time.monotonic() + (0.0 if error is None else _GRACE)
        ended = self._ended()
        while not ended and time.monotonic() < deadline:
            time.sleep(0.01)
            ended = self._ended()
        if not ended:
            if error is not None:
                self.close()
            return
        rank = min(ended, key=lambda rank: (ended[rank] == LOST_ANOTHER, rank))
        message = (
            f"Rank {rank} of {self.num_ranks} (process {self.process_ids[rank - 1]}) "
            f"{_how(ended[rank])}, so the model is not whole any more and all ranks have been "
            f"ended; load it again.{self._last_words(rank)}"
        )
        self.close()
        raise WorkerError(message)

    def close(self) -> None:
        """End all of them, and forget their files."""
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        deadline = time.monotonic() + _GRACE
        for process in self._processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, rank: int) -> "subprocess.Popen[bytes]":
        with self._log(rank).open("wb") as log:
            return start_module(
                "minigen.parallel.worker",
                *(str(rank), str(self.num_ranks), str(self.meeting)),
                stdout=log,
                stderr=log,
            )

    def _ended(self) -> dict[int, int]:
        polls = {rank: process.poll() for rank, process in enumerate(self._processes, start=1)}
        return {rank: status for rank, status in polls.items() if status is not None}

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.txt"

    def _last_words(self, rank: int) -> str:
        log = self._log(rank)
        text = log.read_text("utf-8", errors="replace") if log.exists() else ""
        lines = text.strip().splitlines()
        return f" Its last words: {lines[-1].strip()}" if lines else ""


def _how(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"
