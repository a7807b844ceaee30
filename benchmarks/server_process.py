"""A server of minigen in its own process, for benchmarks over HTTP."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit


@contextmanager
def server(*options: str) -> Iterator[tuple[str, int]]:
    """Run `minigen serve` with these options; yield the address where it listens."""
    command = [sys.executable, "-m", "minigen", "serve", *options, "--no-access-log", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, encoding="utf-8") as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if found := re.search(r"at (http://\S+)/v1", line):
                    break
            address = urlsplit(found[1])  # type: ignore[index]
            yield str(address.hostname), int(address.port or 0)
        finally:
            process.terminate()
            process.stderr.read()
