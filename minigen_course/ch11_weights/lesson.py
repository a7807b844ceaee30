"""What opening a file costs: cold and warm, read as a whole and mapped.

A single cold reading says little: disks are shared, and a machine below this one may keep what this
one has dropped. So openings take turns, are repeated, and are compared with each other.
"""

import ctypes
import gc
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import torch
from jaxtyping import UInt8
from torch import Tensor

from minigen import SamplingParams
from minigen.checkpoint import gguf, quant_formats
from minigen.checkpoint.quant_formats import FORMATS
from minigen_course.lab.inspect_model import load_model
from minigen_course.lab.memory_watch import forget_pages, resident_bytes

PAGE_BYTES = 4096
MOST_SPREAD = 1.5  # of repeated waits for the disk, the longest against the shortest


@dataclass(frozen=True)
class Opening:
    """What it took to open a file and to use one byte of each of its pages.

    `from_disk` is None where the system does not report how much was read.
    """

    open_seconds: float
    use_seconds: float
    resident_mb: float
    private_mb: float
    from_disk: float | None

    @property
    def seconds(self) -> float:
        """Opening and first use together."""
        return self.open_seconds + self.use_seconds


def copy_to_disk(path: Path, copy: Path) -> Path:
    """Copy a file and wait until the disk has it, so that its pages can be dropped."""
    shutil.copyfile(path, copy)
    with copy.open("rb+") as file:
        os.fsync(file.fileno())
    return copy


def map_bytes(path: Path) -> UInt8[Tensor, " bytes"]:
    """Map a file: nothing is read yet."""
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)


def read_bytes(path: Path) -> UInt8[Tensor, " bytes"]:
    """Read a file as a whole into this process's own memory."""
    return torch.from_numpy(np.fromfile(path, np.uint8))


def measure_openings(
    path: Path, ways: Mapping[str, Callable[[Path], Tensor]], rounds: int = 4
) -> dict[str, list[Opening]]:
    """Open a file in several ways, cold and warm; return what each opening took, by way and state.

    The ways take turns, in the opposite order in every other round, and the first round is not
    counted. Cold means that this system dropped the file's pages before. No other process should
    use the file.
    """
    gc.collect()
    found: dict[str, list[Opening]] = {}
    for turn in range(rounds):
        for way, open_file in list(ways.items())[:: 1 if turn % 2 else -1]:
            forget_pages(path)
            for state in ("cold", "warm"):
                taken = _opening(path, open_file)
                if turn:
                    found.setdefault(f"{way}, {state}", []).append(taken)
    order = [f"{way}, {state}" for state in ("warm", "cold") for way in ways]
    return {name: found[name] for name in order}


def _opening(path: Path, open_file: Callable[[Path], Tensor]) -> Opening:
    return_free_memory()
    disk, private = _bytes_from_disk(), private_bytes()
    data, opening, held = cost(lambda: open_file(path))
    _, use, more = cost(lambda: data[::PAGE_BYTES].sum())
    after = _bytes_from_disk()
    from_disk = None if disk is None or after is None else (after - disk) / path.stat().st_size
    return Opening(opening, use, held + more, max(0, private_bytes() - private) / 1e6, from_disk)


def private_bytes() -> int:
    """Return the resident memory that belongs to this process alone, and to no file."""
    process = psutil.Process()
    memory = process.memory_info()
    shared = getattr(memory, "shared", None)  # Linux
    return int(process.memory_full_info().uss if shared is None else memory.rss - shared)


def _bytes_from_disk() -> int | None:
    """Return how many bytes the system has fetched from disks for this process, if it says so."""
    try:
        return int(psutil.Process().io_counters().read_bytes)
    except (AttributeError, psutil.Error, OSError):
        return None


def middle(openings: Sequence[Opening]) -> Opening:
    """Return the medians of repeated openings."""
    shares = [each.from_disk for each in openings if each.from_disk is not None]
    return Opening(
        median(each.open_seconds for each in openings),
        median(each.use_seconds for each in openings),
        median(each.resident_mb for each in openings),
        median(each.private_mb for each in openings),
        median(shares) if shares else None,
    )


def disk_spread(found: Mapping[str, Sequence[Opening]]) -> float:
    """Return how many times as long the longest wait for the disk was as the shortest.

    A wait is what a cold opening took beyond the median of the warm ones of its way; it counts as
    a millisecond at least. All ways wait for the same bytes.
    """
    waits = [
        max(1e-3, each.seconds - middle(found[name.replace("cold", "warm")]).seconds)
        for name, openings in found.items()
        if name.endswith("cold")
        for each in openings
    ]
    return max(waits) / min(waits)


def cold_is_sound(found: Mapping[str, Sequence[Opening]]) -> bool:
    """Return whether the cold openings can be trusted: the disk was read, and equally fast."""
    cold = [each for name in found if name.endswith("cold") for each in found[name]]
    was_read = all(each.from_disk is None or each.from_disk > 0.9 for each in cold)
    return was_read and disk_spread(found) <= MOST_SPREAD


def return_free_memory() -> None:
    """Give freed memory back to the system, so that what is taken next counts as new."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)


def cost(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """Run `work`; return its result, its seconds, and the megabytes that became resident."""
    before, started = resident_bytes(), time.perf_counter()
    made = work()
    seconds = time.perf_counter() - started
    return made, seconds, max(0, resident_bytes() - before) / 1e6


def median_cost(work: Callable[[], Any], repeats: int = 5) -> tuple[Any, float, float]:
    """Run `work` several times; return its result, the median seconds, and the most megabytes.

    The megabytes are those that became resident while `work` ran. Each run gets new memory.
    """
    seconds, megabytes, made = [], [], None
    gc.collect()
    for _ in range(repeats):
        made = None
        return_free_memory()
        made, taken, memory = cost(work)
        seconds.append(taken)
        megabytes.append(memory)
    return made, median(seconds), max(megabytes)


@contextmanager
def refreshed_formats() -> Iterator[None]:
    """Let the engine's table of formats hold the `unpack_q4_1` that its module holds now.

    The table holds functions, so it does not notice that `using` has replaced one of them.
    """
    current = replace(FORMATS["Q4_1"], unpack=quant_formats.unpack_q4_1)
    with patch.dict(FORMATS, {"Q4_1": current}):
        yield


@contextmanager
def opened_by(read: Callable[[Path], Tensor]) -> Iterator[None]:
    """Let minigen open GGUF files by `read`, which returns a file's bytes, such as `read_bytes`."""
    with patch.object(gguf, "_map", lambda path, size: read(path)):
        yield


@dataclass(frozen=True)
class FirstAnswer:
    """A model's answer after loading, the seconds to load it and to its first token, its memory."""

    text: str
    load_seconds: float
    token_seconds: float
    megabytes: float

    @property
    def seconds(self) -> float:
        """From opening the file to the first token."""
        return self.load_seconds + self.token_seconds


def first_answer(
    path: Path, open_file: Callable[[Path], Tensor], prompt: str, max_tokens: int = 6
) -> FirstAnswer:
    """Load a GGUF file that `open_file` opens, as float32, and let the model answer greedily."""
    with opened_by(open_file), refreshed_formats():
        load = partial(load_model, str(path), weights="float32")
        llm, load_seconds, memory = median_cost(load, repeats=1)
    one, greedy = (SamplingParams(temperature=0, max_tokens=most) for most in (1, max_tokens))
    _, token_seconds, more = cost(partial(llm.generate, prompt, one))
    return FirstAnswer(
        llm.generate(prompt, greedy).text, load_seconds, token_seconds, memory + more
    )
