"""Find a learner's answers in a notebook or in a Python file, and run their definitions.

An answer is a cell that begins with `# exercise: ` (or `# hunt: `) and the full name of a part, or
a Python file with such a line.
"""

import ast
import builtins
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from minigen_course.handout.cells import parsed

MARK, HUNT_MARK = "# exercise: ", "# hunt: "
DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
MARKED = re.compile(rf"(?m)^(?:{MARK}|{HUNT_MARK})([\w.]+)$")
UNDEFINED = re.compile(r"name '(\w+)' is not defined")
PLAIN = (  # what the expression of a plain value may consist of, beside calls of `CALLED`
    *(ast.Constant, ast.JoinedStr, ast.FormattedValue, ast.Attribute, ast.Subscript, ast.Slice),
    *(ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Starred, ast.keyword, ast.IfExp),
    *(ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare),
    *(ast.unaryop, ast.operator, ast.boolop, ast.cmpop, ast.expr_context),
)
CALLED = {  # functions of Python that compute a plain value from others
    *("bool", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "range", "set"),
    *("str", "tuple", "abs", "enumerate", "len", "max", "min", "round", "sorted", "sum", "zip"),
}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
LONGEST = 60  # characters of a line in a message


def cells_of(path: Path) -> list[str]:
    """Return the sources of a notebook's code cells; of a Python file, its text as one cell.

    Raises `ValueError` for what is neither.
    """
    try:
        if path.suffix != ".ipynb":
            return [path.read_text(encoding="utf-8-sig")]
        cells = notebook_cells(path)
        return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        kind = "a notebook" if path.suffix == ".ipynb" else "Python code"
        raise ValueError(f"cannot be read as {kind} ({error})") from error


def notebook_cells(path: Path) -> list[Any]:
    """Return a notebook's cells. Raises `ValueError`, `KeyError` or `TypeError` if it is none."""
    try:
        cells: list[Any] = json.loads(path.read_text(encoding="utf-8-sig"))["cells"]
    except RecursionError:
        raise ValueError("its lists are nested too deeply") from None
    return cells


def marks_in(path: Path) -> list[str]:
    """Return the full names of the parts that a file has answers to, in order.

    Raises `ValueError` for a file that cannot be read.
    """
    return [found[1] for source in cells_of(path) for found in MARKED.finditer(source)]


def answers_in(path: Path, mark: str) -> Mapping[str, Any] | str | None:
    """Return what a file defines; None if no cell has `mark` as a line.

    A str says why the file cannot be read or the marked cell cannot be run. Only what
    `Definitions` keeps is run: no loops, no prints. What the marked cell defines stays, even if a
    later cell imports something of that name.
    """
    try:
        sources = cells_of(path)
    except ValueError as error:
        return str(error)
    if not any(_has(source, mark) for source in sources):
        return None
    module = ModuleType("__main__")  # pickled by value, like a notebook's own objects
    answer: dict[str, Any] = {}
    definitions = Definitions()
    for source in sources:
        try:
            statements = definitions.read(source)
            exec(compile(ast.Module(statements, []), path.name, "exec"), vars(module))
        except Exception as error:
            if _has(source, mark):
                return explained(f"raised {type(error).__name__}: {error}", sources)
        else:
            if _has(source, mark):
                answer |= {name: vars(module)[name] for name in defined_by(statements)}
    return vars(module) | answer


def defined_by(statements: Iterable[ast.stmt]) -> list[str]:
    """Return the names of the functions and classes among these statements, also second names."""
    found = []
    for each in statements:
        if isinstance(each, DEFINED):
            found.append(each.name)
        elif isinstance(each, ast.Assign | ast.AnnAssign):
            found += _bound(each) if isinstance(each.value, ast.Name | ast.Lambda) else ()
    return found


def _has(source: str, mark: str) -> bool:
    return mark in source.splitlines()


@dataclass
class Definitions:
    """The imports, functions, classes and assignments of plain values in a learner's cells.

    A plain value is a literal, a lambda, or what operators and some of Python's own functions make
    of plain values and of names that are `known`: nothing that computes for long, or shows
    something. The cells are read in order. `left_out` has the other statements, by the names that
    they would have set.

    >>> cell = "async def one(): ...\\ntwo = one\\none = print()\\nthree = [one]\\nfour: int = -4"
    >>> [ast.unparse(each) for each in Definitions().read(cell)][1:]
    ['two = one', 'four: int = -4']
    """

    known: set[str] = field(default_factory=lambda: set(dir(builtins)))
    left_out: dict[str, str] = field(default_factory=dict)

    def read(self, source: str) -> list[ast.stmt]:
        """Return the definitions of the next cell. Raises `SyntaxError` if it is no Python."""
        kept = []
        for each in parsed(source).body:
            names = set(_bound(each))
            if self._is_kept(each):
                kept.append(each)
                self.known |= names
            else:
                self.known -= names
                line = ast.unparse(each).partition("\n")[0]
                self.left_out |= dict.fromkeys(names, line)
        return kept

    def _is_kept(self, statement: ast.stmt) -> bool:
        if isinstance(statement, ast.AugAssign) and not self.known.issuperset(_bound(statement)):
            return False
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            return all(_is_plain(each, self.known) for each in ast.iter_child_nodes(statement))
        return isinstance(statement, (ast.Import, ast.ImportFrom, *DEFINED))


def _is_plain(node: ast.AST, known: Collection[str]) -> bool:
    if isinstance(node, ast.Name):
        return isinstance(node.ctx, ast.Store) or node.id in known
    if isinstance(node, ast.Lambda):  # its body is not run
        given = (*node.args.defaults, *node.args.kw_defaults)
        return all(each is None or _is_plain(each, known) for each in given)
    if isinstance(node, COMPREHENSIONS):
        known = {*known, *(name for each in node.generators for name in _bound(each.target))}
    elif isinstance(node, ast.Call):
        if not (isinstance(node.func, ast.Name) and node.func.id in CALLED):
            return False
    elif not isinstance(node, (*PLAIN, ast.comprehension)):
        return False
    return all(_is_plain(each, known) for each in ast.iter_child_nodes(node))


def _bound(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement sets in its module."""
    if isinstance(node, DEFINED):
        yield node.name
        return
    if isinstance(node, (ast.Lambda, *COMPREHENSIONS)):
        return
    if isinstance(node, ast.alias):
        yield (node.asname or node.name).partition(".")[0]
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    for each in ast.iter_child_nodes(node):
        yield from _bound(each)


def explained(message: str, sources: Iterable[str]) -> str:
    """Return a message; if it says that a name is missing, with the statement that was left out."""
    missing = UNDEFINED.search(message)
    if missing is None:
        return message
    definitions = Definitions()
    for source in sources:
        with suppress(SyntaxError):
            definitions.read(source)
    line = definitions.left_out.get(missing[1])
    if line is None:
        return message
    shown = line if len(line) <= LONGEST else f"{line[:LONGEST]} …"
    return (
        f"{message}. The line `{shown}` is not run: of a file, only imports, functions, classes "
        f"and plain values are. Compute {missing[1]} inside the part."
    )
