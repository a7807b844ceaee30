"""Exercise stubs and mirrored cells, made from the package's own source.

The package is the solution: a stub is its signature and docstring, with an empty body.
"""

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from copy import copy
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any

OWN = ("minigen", "minigen_course")
MOST_COLUMNS = 100
EMPTY = "raise NotImplementedError  # your turn"
STILL_EMPTY = "is still empty: replace the line that raises NotImplementedError."


def find_object(dotted: str) -> Any:
    """Return a function or class by its full name, like `minigen.sampling.sampler.keep_top_p`.

    Raises `AttributeError` or `ModuleNotFoundError` if there is none.
    """
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


def dotted_name(part: Any) -> str:
    """Return the full name by which `find_object` finds a part."""
    return f"{part.__module__}.{part.__qualname__}"


def mirror(dotted: str) -> str:
    """Return a notebook cell that repeats the package's source."""
    return f"# = {dotted}\n{source_of(dotted)}"


def stub(dotted: str, needs: Sequence[str] = ()) -> str:
    """Return an exercise's cell: the imports for the signature, the signature, no body.

    `needs` are names of the solution's module that the body will use; they are imported as well.
    """
    source = source_of(dotted)
    lines, tree = source.splitlines(), ast.parse(source).body[0]
    if isinstance(tree, ast.ClassDef):
        methods = [each for each in tree.body if isinstance(each, ast.FunctionDef)]
        first = methods[0].lineno - len(methods[0].decorator_list) - 1
        written = "\n".join(lines[:first]).rstrip().splitlines()
        for method in methods:
            if not method.name.startswith("_") or method.name in ("__init__", "__call__"):
                written += ["", *emptied(lines, method)]
        code = "\n".join(written)
    else:
        assert isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef), "a function or a class"
        code = "\n".join(emptied(lines, tree))
    imports = "\n".join(imports_of(dotted.rpartition(".")[0], ast.parse(code), needs))
    between = "\n\n\n" if imports else ""
    return f"# exercise: {dotted}\n{imports}{between}{code}".replace("\n\n\n\n", "\n\n\n")


def is_stub(part: Any) -> bool:
    """Return whether a function, or every method of a class, is still an empty stub.

    >>> def mine(x):
    ...     raise NotImplementedError  # your turn
    >>> is_stub(mine), is_stub(is_stub)
    (True, False)
    """
    if isinstance(part, type):
        members = [_function_of(each) for each in vars(part).values()]
        functions = [each for each in members if isinstance(each, FunctionType)]
        return bool(functions) and all(is_stub(each) for each in functions)
    is_function = isinstance(inspect.unwrap(part), FunctionType)
    return is_function and _steps(part) in (_steps(_empty), _steps(_empty_coroutine))


def _function_of(member: Any) -> Any:
    """Return the function behind a property, a static method or a class method."""
    return getattr(member, "fget", getattr(member, "__func__", member))


def _steps(function: Any) -> tuple[bytes, tuple[str, ...]]:
    code = inspect.unwrap(function).__code__
    return code.co_code, code.co_names


def _empty() -> None:
    raise NotImplementedError


async def _empty_coroutine() -> None:
    raise NotImplementedError


def source_of(dotted: str) -> str:
    """Return the source of a module's function or class, without importing the module.

    That of a method is found by its full name too; only classes begin with a capital letter.
    """
    parent, _, name = dotted.rpartition(".")
    outer, _, owner = parent.rpartition(".")
    module, names = (outer, (owner, name)) if owner[:1].isupper() else (parent, (name,))
    lines, tree = _parsed(module)
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    node: Any = tree
    for each in names:
        defined = [one for one in node.body if isinstance(one, kinds) and one.name == each]
        if not defined:
            raise AttributeError(f"The module {module} defines no {'.'.join(names)}.")
        node = defined[0]
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return "\n".join(lines[first - 1 : node.end_lineno])


@cache  # a sheet asks several times for each of several parts of a module
def _parsed(module: str) -> tuple[list[str], ast.Module]:
    """Return the lines of a module, and its tree, which callers share and do not change."""
    found = find_spec(module)
    assert found is not None, f"there is no module {module}"
    assert found.origin is not None, f"{module} has no file"
    text = Path(found.origin).read_text(encoding="utf-8")
    return text.splitlines(), ast.parse(text)


def emptied(lines: list[str], function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the function's lines up to the end of its docstring, then `EMPTY`."""
    begin = min([function.lineno, *(each.lineno for each in function.decorator_list)]) - 1
    body = function.body[0]
    has_docstring = ast.get_docstring(function) is not None
    end = body.end_lineno if has_docstring else body.lineno - 1
    indent = " " * body.col_offset
    return [*lines[begin:end], indent + EMPTY]


def imports_of(module: str, code: ast.Module, needs: Sequence[str] = ()) -> list[str]:
    """Return the lines that import the names that `code` takes from `module`, and `needs`."""
    used = {node.id for node in ast.walk(code) if isinstance(node, ast.Name)} | set(needs)
    _, tree = _parsed(module)
    found = []
    for node in map(copy, _statements(tree)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [each for each in node.names if (each.asname or each.name) in used]
            used -= {each.asname or each.name for each in names}
            if names:
                node.names = names
                found.append(ast.unparse(node))
    own = sorted((used & set(_defined(tree))) - set(_defined(code)), key=_place_among_names)
    if own:
        found.append(_import_from(module, own))
    found.sort(key=lambda each: (each.startswith("from "), each))  # the order that linters ask for
    groups: list[list[str]] = [[], [], []]  # Python's own, others', minigen's
    for statement in found:
        package = statement.split()[1].partition(".")[0]
        groups[1 + (package in OWN) - (package in sys.stdlib_module_names)].append(statement)
    return "\n\n".join("\n".join(group) for group in groups if group).splitlines()


def _place_among_names(name: str) -> tuple[bool, bool, str]:
    """Return what sorts names as linters ask: constants, then classes, then functions."""
    return not name.isupper(), name[0].islower(), name


def _import_from(module: str, names: Sequence[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= MOST_COLUMNS:
        return line
    return "\n".join([f"from {module} import (", *(f"    {each}," for each in names), ")"])


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield a module's statements, including those inside its `try` blocks."""
    for node in tree.body:
        yield from node.body if isinstance(node, ast.Try) else [node]


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (each.id for each in node.targets if isinstance(each, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
