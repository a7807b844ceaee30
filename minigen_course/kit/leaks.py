"""Search what learners get for a solution: its statements, its lines, an import of the part itself.

The package is the solution and learners have it, so nothing here keeps a part secret; it keeps an
assignment from handing it over.
"""

import ast
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from minigen_course.handout.cells import parsed
from minigen_course.kit.assignment import Item
from minigen_course.kit.screen import OWN, first_name

SHORTEST = 30  # characters of a statement or a line that says something


@dataclass(frozen=True)
class Released:
    """A file that learners get: its code, cell by cell, and all of its text."""

    name: str
    code: tuple[str, ...]
    text: str


def released_notebook(name: str, text: str) -> Released:
    """Return a notebook as it is searched: code cells, and every string in it, also metadata."""
    notebook = json.loads(text)
    code = tuple(
        "".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"
    )
    return Released(name, code, "\n".join(_strings(notebook)))


def _strings(value: object) -> Iterator[str]:
    """Yield all strings; those of a list as one text, as notebooks store a text's lines."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list) and all(isinstance(each, str) for each in value):
        yield "".join(value)
    elif isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(each)


def leaks(released: Iterable[Released], items: Iterable[Item]) -> list[str]:
    """Return a sentence for each place in the released files that gives a solution away."""
    files = list(released)
    return [said for item in items for file in files for said in _leaks(file, item)]


def _leaks(file: Released, item: Item) -> Iterator[str]:
    if item.kind == "written":
        if any(line in file.text for line in _lines(item.solution + "\n" + item.rubric)):
            yield f"{file.name} has the model answer of {item.name}."
        return
    if item.kind == "question":
        why = item.solution.partition("#")[2].strip()
        if why in file.text:
            yield f"{file.name} says how {item.name} is answered."
        return
    given = f"{item.stub}\n{item.text}\n{item.use}"
    telling = {each for each in _statements(item.solution) if each not in given}
    telling -= set(_statements(item.stub))
    for code in file.code:
        for statement in _statements(code):
            if statement in telling:
                yield f"{file.name} has a statement of {item.name}'s solution: {statement}"
        if _imports_part(code, item.name):
            yield f"{file.name} imports the package's own {item.name}."
    for line in _lines(item.solution):
        if line not in given and line in file.text:
            yield f"{file.name} has a line of {item.name}'s solution: {line}"


def _statements(code: str) -> Iterator[str]:
    """Yield the statements of a piece of code that say something, each in one normal form."""
    try:
        tree = parsed(code)
    except SyntaxError:
        return
    kinds = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Expr, ast.Raise)
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not isinstance(node, kinds):
            text = ast.unparse(node)
            if len(text) >= SHORTEST:
                yield text


def _lines(text: str) -> Iterator[str]:
    """Yield the lines that say something; not those of imports or signatures, nor lone comments."""
    for line in text.splitlines():
        found = line.strip()
        if len(found) >= SHORTEST and not found.startswith(
            ("import ", "from ", "def ", "#", "class ")
        ):
            yield found


def _imports_part(code: str, name: str) -> bool:
    """Return whether code imports something of minigen that has a part's name."""
    try:
        tree = parsed(code)
    except SyntaxError:
        return False
    return any(
        isinstance(node, ast.ImportFrom)
        and first_name(node.module or "") in OWN
        and name in [each.name for each in node.names]
        for node in ast.walk(tree)
    )
