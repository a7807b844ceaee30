"""Child processes of minigen: each one is a new Python interpreter, never a fork."""

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

PACKAGES = Path(__file__).resolve().parents[1]  # where `minigen` is imported from
Output = int | IO[bytes]


def environment() -> dict[str, str]:
    """Return the environment in which another Python imports this minigen."""
    paths = [str(PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def start_module(
    module: str, *arguments: str, stdout: Output, stderr: Output
) -> "subprocess.Popen[bytes]":
    """Start `python -m module`, with a pipe as its stdin, which closes when this process ends.

    It works from notebooks, from stdin and from scripts without an `if __name__ == "__main__"`.
    The module is imported from the folder of this minigen, and files in the caller's working
    directory do not shadow its imports. Ctrl-C reaches only the calling process.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        env=environment(),
        start_new_session=True,
    )


def wait_for_starter() -> None:
    """Return when the process that started this one by `start_module` closes the pipe, or ends.

    No data is ever written. The pipe is read without Python's buffer: a thread that waits in
    `sys.stdin.buffer` has its lock, and the interpreter aborts if it ends meanwhile.
    """
    while os.read(sys.stdin.fileno(), 1):
        pass
