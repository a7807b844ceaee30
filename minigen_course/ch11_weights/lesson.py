"""What opening a file costs: cold and warm, read as a whole and mapped.

A single cold reading says little: disks are shared, and a machine below this one may keep what this
one has dropped. So openings take turns, are repeated, and those of one way are compared.
"""

import ctypes
import gc
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

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
MOST_SPREAD = 1.5  # of repeated cold openings of one way, the longest against the shortest
STATES = ("warm", "cold")


@dataclass(frozen=True)
class Opening:
    """What it took to open a file and to use one byte of each of its pages.

    Resident memory is that after opening (`opened_mb`) and after first use; `from_disk` is None
    where the system does not report how much was read.
    """

    open_seconds: float
    use_seconds: float
    opened_mb: float
    resident_mb: float
    private_mb: float
    from_disk: float | None

    @property
    def seconds(self) -> float:
        """Opening and first use together."""
        return self.open_seconds + self.use_seconds


def copy_to_disk(path: Path, copy: Path) -> Path:
    """Copy a file, and `settle` the copy."""
    shutil.copyfile(path, copy)
    return settle(copy)


def settle(path: Path) -> Path:
    """Write a file's pages to the disk, drop them, and read them back into the page cache.

    Pages that a program has just written lie there in larger pieces, which are mapped faster.
    """
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    forget_pages(path)
    read_bytes(path)
    return path


def map_bytes(path: Path) -> UInt8[Tensor, " bytes"]:
    """Map a file: nothing is read yet."""
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)


def read_bytes(path: Path) -> UInt8[Tensor, " bytes"]:
    """Read a file as a whole into new memory of this process, by `Path.read_bytes`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that bytes must not be written to: nothing does
        return torch.frombuffer(path.read_bytes(), dtype=torch.uint8)


def reread_seconds(path: Path) -> float:
    """Return the median seconds of reading a file into memory that this process has used before."""
    memory = bytearray(path.stat().st_size)

    def reread() -> None:
        with path.open("rb") as file:
            file.readinto(memory)

    return median_cost(reread)[1]


def measure_openings(
    ways: Mapping[str, tuple[Path, Callable[[Path], Tensor]]],
    states: Sequence[str] = STATES,
    rounds: int = 4,
) -> dict[str, list[Opening]]:
    """Open files in several ways; return what each opening took, by way and state.

    The ways take turns, in the opposite order in every other round, and the first round is not
    counted. Cold means that this system dropped the file's pages before, warm that it has read them
    since. No other process should use the files.
    """
    gc.collect()
    found: dict[str, list[Opening]] = {f"{way}, {state}": [] for state in states for way in ways}
    for turn in range(rounds):
        for way, (path, open_file) in list(ways.items())[:: 1 if turn % 2 else -1]:
            for state in states:
                forget_pages(path)
                if state == "warm":
                    read_bytes(path)
                taken = _opening(path, open_file)
                if turn:
                    found[f"{way}, {state}"].append(taken)
    return found


def _opening(path: Path, open_file: Callable[[Path], Tensor]) -> Opening:
    return_free_memory()
    disk, private = _bytes_from_disk(), private_bytes()
    data, opening, held = cost(lambda: open_file(path))
    pages = data.flatten().view(torch.uint8)[::PAGE_BYTES]
    _, use, more = cost(pages.sum)
    after = _bytes_from_disk()
    from_disk = None if disk is None or after is None else (after - disk) / path.stat().st_size
    return Opening(
        opening, use, held, held + more, max(0, private_bytes() - private) / 1e6, from_disk
    )


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
        median(each.opened_mb for each in openings),
        median(each.resident_mb for each in openings),
        median(each.private_mb for each in openings),
        median(shares) if shares else None,
    )


def spread(openings: Sequence[Opening]) -> float:
    """Return how many times as long the longest of repeated openings took as the shortest."""
    seconds = [each.seconds for each in openings]
    return max(seconds) / min(seconds)


def is_sound(cold: Sequence[Opening]) -> bool:
    """Return whether one way's cold openings can be trusted: they agree, and the disk was read."""
    was_read = all(each.from_disk is not None and each.from_disk > 0.9 for each in cold)
    return was_read and spread(cold) <= MOST_SPREAD


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


def answer(path: Path, prompt: str, max_tokens: int = 6) -> str:
    """Load a GGUF file as float32, by the `unpack_q4_1` of now; return the greedy answer."""
    with refreshed_formats():
        llm = load_model(str(path), weights="float32", threads=1)
    return llm.generate(prompt, SamplingParams(temperature=0, max_tokens=max_tokens)).text


def measure_starts(
    ways: Mapping[str, tuple[Path, Callable[[Path], Tensor]]], prompt: str, rounds: int = 2
) -> dict[str, list[float]]:
    """Return the seconds from opening a GGUF file to a model's first token, by way of opening it.

    The ways take turns, in the opposite order in every other round, on one thread.
    """
    found: dict[str, list[float]] = {way: [] for way in ways}
    first = SamplingParams(temperature=0, max_tokens=1)
    for turn in range(rounds):
        for way, (path, open_file) in list(ways.items())[:: 1 if turn % 2 else -1]:
            gc.collect()
            return_free_memory()
            with opened_by(open_file):
                started = time.perf_counter()
                load_model(str(path), weights="float32", threads=1).generate(prompt, first)
                found[way].append(time.perf_counter() - started)
    return found
