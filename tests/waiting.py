"""How tests wait: for what happens, and long enough for any machine that is busy."""

import time
from collections.abc import Callable

PATIENCE = 120.0  # seconds until a test gives up: far more than is ever needed


def wait_until(happened: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait for what another thread or process brings about; fail if it never does."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.002)
