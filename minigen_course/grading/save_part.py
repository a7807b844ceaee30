"""A part that was written in a notebook, as a file that `minigen serve` can load."""

import ast
import builtins
import inspect
import linecache
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any


def save_part(part: Any, path: str | Path) -> str:
    """Write a class or function of a notebook, and all that it uses, to a file; returns its name.

    The name is what `minigen serve --scheduler` takes: `file.py:Name`. What the notebook defines
    (functions, classes, plain values) is written down, all else is imported from its module.
    Raises `ValueError` for what can be neither.
    """
    writer = _Writer(vars(sys.modules["__main__"]))
    writer.write(part.__name__, part)
    path = Path(path)
    path.write_text(writer.text(), encoding="utf-8")
    return f"{path}:{part.__name__}"


class _Writer:
    """Collects imports and definitions, each after those that it uses."""

    def __init__(self, names: dict[str, Any]):
        self.names = names
        self.imports: set[str] = set()
        self.definitions: dict[str, str] = {}

    def text(self) -> str:
        """All of them as a module."""
        parts = ["\n".join(sorted(self.imports)), *self.definitions.values()]
        return "\n\n\n".join(part for part in parts if part) + "\n"

    def write(self, name: str, found: Any) -> None:
        """Add what a name stands for, as its name."""
        if name in self.definitions:
            return
        if isinstance(found, ModuleType):
            self._import(f"import {found.__name__}", found.__name__, name)
        elif getattr(found, "__module__", "__main__") != "__main__":
            module, own = found.__module__, getattr(found, "__qualname__", name)
            self._import(f"from {module} import {own}", own, name)
        elif isinstance(found, type | FunctionType):
            self._define(name, found)
        else:
            self._state(name, found)

    def _import(self, line: str, own: str, name: str) -> None:
        self.imports.add(line if own == name else f"{line} as {name}")

    def _define(self, name: str, found: type | FunctionType) -> None:
        source = _source(found)
        self.definitions[name] = ""  # so that one that uses itself is not written twice
        for used in _used(source):
            if used in self.names and used != name and not hasattr(builtins, used):
                self.write(used, self.names[used])
        del self.definitions[name]
        self.definitions[name] = source

    def _state(self, name: str, value: Any) -> None:
        text = repr(value)
        try:
            ast.literal_eval(text)
        except (ValueError, SyntaxError):
            raise ValueError(
                f"{name} is {text[:60]}, which cannot be written to a file; hand it in as an "
                "argument, or make it inside."
            ) from None
        self.definitions[name] = f"{name} = {text}"


def _source(found: type | FunctionType) -> str:
    """Its text, found by the code of a function, which knows its cell."""
    functions = [found] if isinstance(found, FunctionType) else vars(found).values()
    for each in functions:
        function = inspect.unwrap(each) if isinstance(each, FunctionType) else each
        if not isinstance(function, FunctionType):
            continue
        lines = linecache.getlines(function.__code__.co_filename)
        for node in ast.walk(ast.parse(_without_magics(lines))):
            kinds = ast.ClassDef | ast.FunctionDef
            if isinstance(node, kinds) and node.name == found.__name__:
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                return "".join(lines[first - 1 : node.end_lineno]).rstrip()
    raise ValueError(f"{found.__name__} has no source that could be written to a file.")


def _without_magics(lines: list[str]) -> str:
    """The lines, those of IPython's own (%, !) emptied."""
    return "".join("\n" if line.lstrip().startswith(("%", "!")) else line for line in lines)


def _used(source: str) -> list[str]:
    """Names that a definition reads, in order."""
    nodes = ast.walk(ast.parse(source))
    return list(dict.fromkeys(node.id for node in nodes if isinstance(node, ast.Name)))
