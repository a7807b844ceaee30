"""Work that can be interrupted: finished matrices wait in a folder beside the output.

    OUT.partial/manifest.json      what is being made, of what
    OUT.partial/0007.safetensors   one finished matrix, under its place in the list of matrices
    OUT.partial/out...             the output while it is written; then it is renamed to OUT

A file of a matrix is written under another name and then renamed, so it is there whole or not at
all. A second run finds the finished matrices; a run with other settings or another source refuses.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minigen.errors import DiskError, FileFormatError, OptionError
from minigen.export.safetensors_writer import ready, write_safetensors
from minigen.hub.pypi import format_bytes

FLOATING = "floating"  # the form of a piece that is not quantized, such as a changed norm
_HASHED = 2**20  # bytes at the beginning and at the end of each file of a source


@dataclass(frozen=True)
class Piece:
    """A finished matrix: what it is stored as, and its tensors by the suffix of their names.

    For GGUF, `form` is the kind and the only tensor is "blocks", the bytes of the rows in the
    order of transformers' checkpoints.
    """

    form: str
    tensors: Mapping[str, Shaped[Tensor, "..."]]


def identity_of(path: Path) -> dict[str, Any]:
    """Return what tells a model from another one, or from its next version, without its path.

    It is, for each file with weights, configuration or vocabulary, the name, the size, the time of
    its last change in nanoseconds, and a hash of both ends. Another model of the same shape may
    have equal ends and the same size, so a copy with a new time counts as another model, too.
    """
    found = [*path.glob("*.safetensors"), *path.glob("*.json")]
    files = [path] if path.is_file() else sorted(found)
    return {file.name: _identity_of_file(file) for file in files}


def _identity_of_file(file: Path) -> list[int | str]:
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns, _hash_of_ends(file)]


def _hash_of_ends(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        digest.update(opened.read(_HASHED))
        opened.seek(max(file.stat().st_size - _HASHED, 0))
        digest.update(opened.read(_HASHED))
    return digest.hexdigest()


class PartialOutput:
    """The folder OUT.partial of one process; make it with `partial_output`."""

    def __init__(self, out: Path, folder: Path, names: tuple[str, ...]) -> None:
        self.out, self.folder = out, folder
        self._places = {name: place for place, name in enumerate(names)}

    def has(self, name: str) -> bool:
        """Whether the matrix of this name is finished."""
        return self._path(name).exists()

    def may_have(self, name: str) -> bool:
        """Whether a matrix of this name is among those to be made."""
        return name in self._places

    def put(self, name: str, piece: Piece) -> None:
        """Keep a finished matrix."""
        part = self._path(name).with_suffix(".part")
        tensors = {key: ready(tensor) for key, tensor in piece.tensors.items()}
        write_safetensors(part, tensors, {"name": name, "form": piece.form})
        os.replace(part, self._path(name))

    def get(self, name: str) -> Piece:
        """Return a finished matrix; its tensors are mapped from the file and not yet read."""
        try:
            with safe_open(self._path(name), framework="pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
                return Piece(file.metadata()["form"], tensors)
        except (SafetensorError, OSError, KeyError, TypeError) as error:
            raise FileFormatError(
                f"{self._path(name)} is damaged ({error}); delete it, and the same command makes "
                "it again."
            ) from None

    @contextmanager
    def writing(self) -> Iterator[Path]:
        """Yield the path to write the output to; afterwards it becomes OUT, and the folder goes."""
        path = self.folder / "out"
        _remove(path)
        yield path
        _sync(path)
        if os.path.lexists(self.out):
            raise OptionError(f"{self.out} has appeared meanwhile, so the output stays in {path}.")
        os.replace(path, self.out)
        shutil.rmtree(self.folder)

    def _path(self, name: str) -> Path:
        return self.folder / f"{self._places[name]:04d}.safetensors"


def folder_of(out: Path) -> Path:
    """Return the folder in which the finished matrices of an output wait: OUT.partial."""
    return out.with_name(out.name + ".partial")


def refuse_existing(out: Path) -> None:
    """Raise `OptionError` if there is anything at `out`, even a link to nothing."""
    if os.path.lexists(out):
        raise OptionError(f"{out} exists; name another output, or remove it.")


@contextmanager
def partial_output(
    out: Path, identity: Mapping[str, Any], names: tuple[str, ...]
) -> Iterator[PartialOutput]:
    """Make or find OUT.partial, for one process at a time, and turn disk errors into sentences.

    `identity` says of what and how the output is made: JSON values. `names` are the matrices.
    Raises `OptionError` if OUT exists, if OUT.partial holds the beginning of something else, or if
    another process works in it; `DiskError` if the disk is full or not writable.
    """
    refuse_existing(out)
    folder = folder_of(out)
    with _disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise OptionError(f"Another process is working in {folder}; wait for it.") from None
        try:
            _refuse_finished(out, folder)
            _check_manifest(folder, {**identity, "matrices": list(names)})
            yield PartialOutput(out, folder, names)
        finally:
            lock.release()


def _refuse_finished(out: Path, folder: Path) -> None:
    """Refuse an output that another process has finished just now, and leave no empty folder."""
    try:
        refuse_existing(out)
    except OptionError:
        if not any(folder.glob("*.safetensors")):
            shutil.rmtree(folder)
        raise


def _check_manifest(folder: Path, identity: Mapping[str, Any]) -> None:
    path = folder / "manifest.json"
    if not path.exists() or not any(folder.glob("*.safetensors")):  # nothing was finished
        part = path.with_suffix(".part")
        part.write_text(json.dumps(identity, indent=1), encoding="utf-8")
        os.replace(part, path)
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    wanted = json.loads(json.dumps(identity))
    if found == wanted:
        return
    there = found if isinstance(found, dict) else {}
    keys = [key for key in wanted if there.get(key) != wanted[key]]
    what = "another source" if "source" in keys else "other settings"
    differs = [
        f"{key} {there.get(key)!r}, now {wanted[key]!r}"
        for key in keys
        if key not in ("source", "matrices")
    ]
    if "source" in keys:
        differs += _changed_files(there.get("source"), wanted["source"])
    raise OptionError(
        f"{folder} holds the beginning of an output with {what}"
        f"{f' ({joined})' if (joined := ', '.join(differs)) else ''}; repeat that command to go on "
        "with it, remove the folder, or name another output."
    )


def _changed_files(there: Any, wanted: Mapping[str, Any]) -> list[str]:
    """Return which files of a source were changed, if the source has the same files as before."""
    if not isinstance(there, dict) or there.keys() != wanted.keys():
        return []
    changed = [name for name in wanted if there[name] != wanted[name]]
    return [f"{name} was changed, replaced or copied since" for name in changed]


def require_space(out: Path, num_bytes: int) -> None:
    """Raise `DiskError` if the disk of an output and its pieces, `num_bytes` in all, is too full.

    What an earlier run left in OUT.partial takes its space already. Folders may not exist yet.
    """
    folder = folder_of(out.absolute())
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # another process may work there
                num_bytes -= os.path.getsize(os.path.join(place, name))
    there = next(each for each in folder.parents if os.path.exists(each))
    free = shutil.disk_usage(there).free
    if free < num_bytes:
        raise DiskError(
            f"{there} has {format_bytes(free)} of free space, but about {format_bytes(num_bytes)} "
            "are needed; free some space, or name an output on another disk."
        )


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = getattr(error, "errno", None)
        is_full = number in (errno.ENOSPC, errno.EDQUOT) or any(
            words in str(error) for words in ("No space left", "requested and", "enough free space")
        )  # of safetensors, and of numpy's `tofile`, which gives no number
        reason = "the disk is full" if is_full else getattr(error, "strerror", None) or str(error)
        raise DiskError(
            f"Writing to {folder} failed: {reason}; what was finished stays there, and the same "
            "command goes on with it."
        ) from error


def _sync(path: Path) -> None:
    """Wait until a file, or the files of a folder, are on the disk."""
    for each in [path] if path.is_file() else sorted(path.iterdir()):
        with each.open("rb") as file:
            os.fsync(file.fileno())


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
