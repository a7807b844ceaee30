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
    if not isinstance(getattr(part, "__name__", None), str):
        raise ValueError(f"{part!r:.60} has no name of its own; save a class or a function.")
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
        elif own := _own_name(found, name):
            self._import(f"from {found.__module__} import {own}", own, name)
        elif isinstance(found, type | FunctionType) and found.__module__ == "__main__":
            self._define(name, found)
        else:
            self._state(name, found)

    def _import(self, line: str, own: str, name: str) -> None:
        self.imports.add(line if own == name else f"{line} as {name}")

    def _define(self, name: str, found: type | FunctionType) -> None:
        own = found.__name__
        source = _source(found)
        if name != own:
            if self.names.get(own) is not found:
                raise ValueError(f"{name} is an earlier {own}; define it under its own name.")
            self.write(own, found)
            self.definitions[name] = f"{name} = {own}"
            return
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


def _own_name(found: Any, name: str) -> str | None:
    """Return a name by which an object can be imported from its module, `name` if it is one."""
    module = getattr(found, "__module__", None)
    if module in (None, "__main__") or module not in sys.modules:
        return None
    names = vars(sys.modules[module])
    usual = (name, getattr(found, "__name__", name))
    return next((each for each in (*usual, *names) if names.get(each) is found), None)


def _source(found: type | FunctionType) -> str:
    """Return the source, found through a function's code, which names its cell and its line."""
    functions = [found] if isinstance(found, FunctionType) else vars(found).values()
    kinds = ast.ClassDef if isinstance(found, type) else ast.FunctionDef | ast.AsyncFunctionDef
    for each in functions:
        function = inspect.unwrap(each) if isinstance(each, FunctionType) else each
        if not isinstance(function, FunctionType):
            continue
        code = function.__code__
        lines = linecache.getlines(code.co_filename)
        for node in ast.walk(ast.parse("".join(lines))):
            if isinstance(node, kinds) and node.name == found.__name__:
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                last = node.end_lineno or first
                if first <= code.co_firstlineno <= last:
                    return "".join(lines[first - 1 : last]).rstrip()
    raise ValueError(f"{found.__name__} has no source to write to a file; define it in a cell.")


def _used(source: str) -> list[str]:
    """Return the names that a definition reads, in order."""
    nodes = ast.walk(ast.parse(source))
    return list(dict.fromkeys(node.id for node in nodes if isinstance(node, ast.Name)))
