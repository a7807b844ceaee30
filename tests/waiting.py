"""How tests wait for an event, long enough for any busy machine."""

import time
from collections.abc import Callable

PATIENCE = 120.0  # seconds until a test fails: far more than is ever needed


def wait_until(happened: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait for an effect of another thread or process; fail if it never comes."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.002)
