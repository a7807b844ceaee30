"""Parts of the engine by name, from a learner's file, or as they are handed in."""

import importlib.util
import inspect
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from minigen.checked.complaint import name_of
from minigen.errors import OptionError

METHODS = {
    "scheduler": ("add", "next_batch", "commit", "abort"),
    "allocator": ("allocate", "share", "release", "num_owners"),
    "prefix_cache": ("match", "insert", "join", "leave", "evict"),
    "sampler": ("__call__",),
    "attend": ("__call__",),
}


def find_part(socket: str, wanted: Any, known: Mapping[str, Any]) -> Any:
    """What is to be put into a socket: a known name's, what `file.py:Name` holds, or the thing.

    Raises `OptionError` for a name that leads nowhere.
    """
    if not isinstance(wanted, str):
        return wanted
    if wanted in known:
        return known[wanted]
    file, colon, name = wanted.rpartition(":")
    if not colon or not file.endswith(".py"):
        names = ", ".join(known)
        raise OptionError(f"{socket} must be one of {names}, or file.py:Name, not {wanted!r}.")
    module = _import_file(socket, Path(file))
    if not hasattr(module, name):
        raise OptionError(f"{socket} {wanted!r}: {file} defines no {name}.")
    return getattr(module, name)


def build_part(socket: str, part: Any, **arguments: Any) -> Any:
    """An instance of `part`: made with `arguments` if it is a class or a function that makes one.

    What has the socket's methods already is taken as it is. Raises `OptionError` for what does not
    fit into the socket.
    """
    if not inspect.isclass(part) and _lacks(socket, part) == []:
        return part
    if not callable(part):
        raise OptionError(f"{socket} {name_of(part)} has no {', '.join(_lacks(socket, part))}.")
    try:
        inspect.signature(part).bind(*arguments.values())
    except TypeError:
        raise OptionError(
            f"{socket} {name_of(part)} must be made by {name_of(part)}({', '.join(arguments)})."
        ) from None
    except ValueError:  # no signature to be had
        pass
    made = part(*arguments.values())
    if lacks := _lacks(socket, made):
        raise OptionError(f"{socket} {name_of(part)} has no method {', '.join(lacks)}.")
    return made


def _lacks(socket: str, part: Any) -> list[str]:
    return [name for name in METHODS[socket] if not callable(getattr(part, name, None))]


def _import_file(socket: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise OptionError(f"{socket}: there is no file {path}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "a .py file has a specification"
    assert spec.loader is not None, "and a loader"
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise OptionError(
            f"{socket}: {path} could not be imported: {type(error).__name__}: {error}"
        ) from error
    return module
