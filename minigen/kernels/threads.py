"""One thread count for torch and Numba, and one kernel at a time.

Each has threads of its own, and both let them spin for a while when their work is done: on few
cores whoever comes next would wait for them. So while Numba computes, torch keeps to one thread,
and it does until a runner that computes with torch sets its own number at its next step.
Numba's simplest threading layer must not be entered by two threads at once: `one_at_a_time` holds
for the whole process, since the layer does.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numba
import torch

_ENTERED = threading.Lock()


def available_threads(wanted: int) -> int:
    """As many threads as wanted, or all that Numba has."""
    settings: Any = numba.config
    return min(wanted, int(settings.NUMBA_NUM_THREADS))


@contextmanager
def one_at_a_time(num_threads: int) -> Iterator[None]:
    """Compute with so many of Numba's threads, and nobody else with them."""
    with _ENTERED:
        numba.set_num_threads(num_threads)
        torch.set_num_threads(1)
        yield
