"""Other processes of minigen's own: a new Python each, never a fork."""

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

    It works from notebooks, from stdin and from scripts without a guard. The module comes from
    where this minigen is, and files in the caller's folder do not stand in for its imports. Ctrl-C
    reaches this process alone.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        env=environment(),
        start_new_session=True,
    )
