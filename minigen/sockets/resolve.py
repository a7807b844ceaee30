"""Find an implementation by its name or in a user's file, and report the mistakes that it makes."""

import importlib.util
import inspect
import operator
import reprlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from minigen.errors import OptionError, PartError
from minigen.fields import expanded
from minigen.protocols import (
    BlockAllocator,
    GrammarBackend,
    PrefixCache,
    Proposer,
    Sampler,
    Scheduler,
)
from minigen.renamed import renamed_methods


def name_of(part: Any) -> str:
    """Return the name of a part: its own, or its class's."""
    name: str = getattr(part, "__name__", type(part).__name__)
    return name


def part_error(part: Any, method: str, what: str) -> PartError:
    """Make a `PartError`: which method broke the contract, and how to fix it."""
    return PartError(f"{name_of(part)}.{method} {what}." if method else f"{name_of(part)} {what}.")


def items_of(part: Any, method: str, returned: Any, wanted: str) -> list[Any]:
    """Return what a part returned as a list. Raises `PartError`, naming what is `wanted`.

    The message stays short, because the repr of a sequence fills a page.
    """
    if not isinstance(returned, Iterable):
        raise part_error(part, method, f"must return {wanted}, not {reprlib.repr(returned)}")
    return list(returned)


def block_ids_of(part: Any, method: str, returned: Any) -> list[int]:
    """Return what a part returned as block ids. Raises `PartError` if it is no list of them."""
    items = items_of(part, method, returned, "a list of block ids")
    return [whole_number(part, method, item, "must return a list of block ids") for item in items]


def whole_number(part: Any, method: str, value: Any, wanted: str) -> int:
    """Return an integer that a part returned. Raises `PartError`, naming what is `wanted`."""
    try:
        return operator.index(value)
    except TypeError:
        raise part_error(part, method, f"{wanted}; {reprlib.repr(value)} is none") from None


SOCKETS: dict[str, type] = {
    "scheduler": Scheduler,
    "allocator": BlockAllocator,
    "prefix_cache": PrefixCache,
    "sampler": Sampler,
    "grammar_backend": GrammarBackend,
    "proposer": Proposer,
}


def _methods(protocol: type) -> dict[str, tuple[str, ...]]:
    """Return the methods of a protocol and the names of their arguments."""
    return {
        name: tuple(inspect.signature(member).parameters)[1:]
        for name, member in vars(protocol).items()
        if inspect.isfunction(member) and (name == "__call__" or not name.startswith("_"))
    }


# A sampler and an attention backend, for which there is no protocol, are called.
METHODS = {socket: _methods(protocol) for socket, protocol in SOCKETS.items()} | {
    "attention_backend": {"__call__": ("pool", "batch", "windows")}
}
PROPERTIES = {
    socket: [name for name, member in vars(protocol).items() if isinstance(member, property)]
    for socket, protocol in SOCKETS.items()
}
MADE_OF_OTHERS = ("scheduler", "prefix_cache")  # built by the engine, from its other parts


def find_part(socket: str, wanted: Any, known: Mapping[str, Any]) -> Any:
    """Find the part for a socket: by a known name, by `file.py:Name`, or `wanted` itself.

    Raises `OptionError` for a file or a name in it that does not exist.
    """
    if not isinstance(wanted, str):
        return wanted
    if wanted in known:
        return known[wanted]
    file, _, name = wanted.rpartition(":")
    module = _import_file(socket, expanded(file, OptionError, socket))
    if not hasattr(module, name):
        raise OptionError(f"{socket} {wanted!r}: {file} defines no {name}.")
    return getattr(module, name)


def build_part(socket: str, part: Any, **arguments: Any) -> Any:
    """Return an instance of `part`, called with `arguments` if it is a class or a factory.

    A part that fits the socket already is returned unchanged, except in sockets whose parts are
    built from other parts. Raises `OptionError` for a part that does not fit.
    """
    name, given = name_of(part), ", ".join(arguments)
    is_function = "__call__" in METHODS[socket]
    if not inspect.isclass(part):
        misfit = _misfit(socket, part)
        if not misfit and socket in MADE_OF_OTHERS:
            raise OptionError(
                f"{socket} {name} must be a class, or a function that returns an instance, "
                f"called with ({given}): an instance does not know this engine's parts."
            )
        if not misfit:
            return part
        if is_function or not callable(part):
            raise OptionError(f"{socket} {name} {misfit}.")
    elif socket == "attention_backend" and not _misfit(socket, part):
        return part  # each instance is one step's attention
    if not takes(part, tuple(arguments)):
        raise OptionError(f"{socket} {name} must be made by {name}({given}).")
    made = part(*arguments.values())
    if misfit := _misfit(socket, made):
        raise OptionError(f"{socket} {name_of(made)} {misfit}.")
    return made


def _misfit(socket: str, part: Any) -> str:
    """Explain, as the end of a sentence, why `part` does not fit the socket; empty if it does."""
    methods, properties = METHODS[socket], PROPERTIES.get(socket, [])
    if "__call__" in methods:
        fits = callable(part) and takes(part, methods["__call__"])
        return "" if fits else f"must be called with ({', '.join(methods['__call__'])})"
    lacking = [name for name in methods if not callable(getattr(part, name, None))]
    lacking += [name for name in properties if not hasattr(part, name)]
    if lacking:
        needed = ", ".join((*methods, *properties))
        hint = renamed_methods(part, lacking)
        return f"has no {', '.join(lacking)}; a {socket} needs {needed}" + (hint and f"; {hint}")
    for name in properties:
        if not isinstance(getattr(part, name), int):
            return f"must have {name} as a whole number: a property, read without a call"
    for name, arguments in methods.items():
        if not takes(getattr(part, name), arguments):
            return f"has a method {name} that does not take ({', '.join(arguments)})"
    return ""


def takes(function: Any, arguments: tuple[str, ...]) -> bool:
    """Whether a function can be called with these positional arguments."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


def _import_file(socket: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise OptionError(f"{socket}: there is no file {path}.")
    name = f"minigen_part_{path.stem}"  # not only the stem: the file may be called random.py
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a .py file has a specification"
    assert spec.loader is not None, "and a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up here
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and str(error.name).startswith("minigen."):
            raise OptionError(
                f"{socket}: {path} was written for an earlier minigen, which had a module "
                f"{error.name}; `minigen migrate {path}` rewrites it."
            ) from error
        raise OptionError(
            f"{socket}: {path} could not be imported ({type(error).__name__}: {error})."
        ) from error
    return module
