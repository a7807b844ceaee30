"""Find answers that are suspiciously alike, whatever their names, comments and order of imports."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from minigen_course.handout.cells import parsed

WINDOW = 12  # syntax nodes in a row that are compared as one piece
SMALLEST = 40  # nodes: shorter answers are alike by nature
ALIKE = 0.85  # share of common pieces from which a pair is shown


@dataclass(frozen=True)
class Pair:
    """Two students whose answers to an exercise are alike; `share` is 1 for the same code."""

    exercise: str
    one: str
    other: str
    share: float


def alike(exercise: str, sources: Mapping[str, str], known: Sequence[str] = ()) -> list[Pair]:
    """Return the pairs of students with like answers, the most alike first.

    `sources` are the answers by student. `known` are sources that all students have, such as the
    stub and the package's own part: what is alike with these proves nothing, and is left out.
    """
    common = [pieces(each) for each in known]
    found = {student: pieces(source) for student, source in sources.items()}
    usable = {
        student: its
        for student, its in found.items()
        if its and not any(_share(its, each) >= ALIKE for each in common)
    }
    pairs = [
        Pair(exercise, one, other, _share(usable[one], usable[other]))
        for one, other in combinations(sorted(usable), 2)
    ]
    return sorted(
        (each for each in pairs if each.share >= ALIKE),
        key=lambda each: (-each.share, each.one, each.other),
    )


def groups(pairs: Sequence[Pair]) -> list[set[str]]:
    """Return the students of these pairs in groups: each is alike with some other of its group.

    >>> pairs = [Pair("x", *names, share=1.0) for names in ("ab", "cd", "eb")]
    >>> [sorted(each) for each in groups(pairs)]
    [['a', 'b', 'e'], ['c', 'd']]
    """
    found: list[set[str]] = []
    for each in pairs:
        joined = {each.one, each.other}.union(
            *(its for its in found if its & {each.one, each.other})
        )
        found = [its for its in found if not its & joined]
        found.append(joined)
    return sorted(found, key=min)


def pieces(source: str) -> frozenset[tuple[str, ...]]:
    """Return all windows of syntax nodes of a source's definitions, without names; none if short.

    >>> one = "def f(x):\\n    y = x + 1\\n    return y * 2\\n" * 4
    >>> pieces(one) == pieces(one.replace("y", "result").replace("x", "item")) != frozenset()
    True
    """
    try:
        tree = parsed(source)
    except SyntaxError:
        return frozenset()
    nodes = [name for each in tree.body if not _is_import(each) for name in _nodes(each)]
    if len(nodes) < SMALLEST:
        return frozenset()
    return frozenset(
        tuple(nodes[start : start + WINDOW]) for start in range(len(nodes) - WINDOW + 1)
    )


def _is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def _nodes(node: ast.AST) -> Iterator[str]:
    """Yield the kinds of the nodes below, in order; constants and attributes with their values."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring
    if isinstance(node, ast.Constant):
        yield repr(node.value)
    elif isinstance(node, ast.Attribute):
        yield f".{node.attr}"
    elif not isinstance(node, ast.expr_context | ast.arguments):
        yield type(node).__name__
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns"):
            continue
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.AST):
                yield from _nodes(each)


def _share(one: frozenset[tuple[str, ...]], other: frozenset[tuple[str, ...]]) -> float:
    """Return the common pieces as a share of all pieces of both."""
    return len(one & other) / len(one | other) if one or other else 0.0
