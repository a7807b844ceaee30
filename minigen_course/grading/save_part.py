"""Write a part from a notebook to a file that `minigen serve` can load."""

import ast
import builtins
import inspect
import linecache
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any


def save_part(part: Any, path: str | Path) -> str:
    """Write a class or function of a notebook, and all it uses, to a file; return its name.

    The name is what `minigen serve --scheduler` takes: `file.py:Name`. Functions, classes and plain
    values that the notebook defines are written to the file; everything else is imported from its
    module. Raises `ValueError` for a value that can be neither written nor imported.
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
        """Return the imports and definitions as the text of a module."""
        parts = ["\n".join(sorted(self.imports)), *self.definitions.values()]
        return "\n\n\n".join(part for part in parts if part) + "\n"

    def write(self, name: str, found: Any) -> None:
        """Add the object that a name stands for, under this name."""
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
        self.definitions[name] = ""  # so that a recursive one is not written twice
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
                f"{name} is {text[:60]}, which cannot be written to a file; pass it as an "
                "argument, or create it inside the part."
            ) from None
        self.definitions[name] = f"{name} = {text}"


def _source(found: type | FunctionType) -> str:
    """Return the source, found through a function's code, which names its cell."""
    functions = [found] if isinstance(found, FunctionType) else vars(found).values()
    for each in functions:
        function = inspect.unwrap(each) if isinstance(each, FunctionType) else each
        if not isinstance(function, FunctionType):
            continue
        lines = linecache.getlines(function.__code__.co_filename)
        for node in ast.walk(ast.parse(_without_magics(lines))):
            kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            if isinstance(node, kinds) and node.name == found.__name__:
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                return "".join(lines[first - 1 : node.end_lineno]).rstrip()
    raise ValueError(f"{found.__name__} has no source to write to a file; define it in a cell.")


def _without_magics(lines: list[str]) -> str:
    """Join the lines, and empty those of IPython's own commands (%, !)."""
    return "".join("\n" if line.lstrip().startswith(("%", "!")) else line for line in lines)


def _used(source: str) -> list[str]:
    """Return the names that a definition reads, in order."""
    nodes = ast.walk(ast.parse(source))
    return list(dict.fromkeys(node.id for node in nodes if isinstance(node, ast.Name)))
