"""Read a submission's code without running it: what it may not do, and what an instructor reads.

A finding that costs the marks of an exercise is `barred`: it takes the package's own part, changes
minigen, or reaches into the process that grades it. Other findings are only reported.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from minigen_course.grading.stub import source_of
from minigen_course.handout.cells import parsed

OWN = ("minigen", "minigen_course")
FRAMES = {"f_back", "f_globals", "f_locals", "tb_frame", "gi_frame", "cr_frame", "ag_frame"}
INSIDE = {"__globals__", "__subclasses__", "__builtins__", "__code__", "__closure__"}
OUTSIDE = {  # modules that an exercise of this course never needs
    *("ctypes", "gc", "inspect", "importlib", "linecache", "multiprocessing", "pickle", "pty"),
    *("runpy", "shutil", "signal", "socket", "subprocess", "sys", "traceback", "unittest"),
}
CALLS = {"eval", "exec", "compile", "__import__", "globals", "open", "input", "breakpoint"}


@dataclass(frozen=True)
class Finding:
    """Something in a submission's code; `barred` if it costs the marks of its exercise."""

    what: str
    barred: bool = False


def screened(source: str, dotted: str, allowed: Sequence[str] = ()) -> list[Finding]:
    """Return what an answer's code does that it should not.

    `dotted` is the full name of the package's own part, and `allowed` are the dotted names that the
    stub imports. Raises `SyntaxError` for code that cannot be parsed.
    """
    tree = parsed(source)
    found = list(dict.fromkeys(_findings(tree, dotted, frozenset(allowed))))
    if same_code(source, source_of(dotted)):
        found.append(Finding("is the package's own code, statement by statement"))
    return found


def _findings(tree: ast.Module, dotted: str, allowed: frozenset[str]) -> Iterator[Finding]:
    module, _, name = dotted.rpartition(".")
    own_modules = set[str]()  # names that stand for modules of minigen
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from _from(node, module, name, allowed)
            own_modules |= {each.asname or each.name for each in node.names if _is_own(node.module)}
        elif isinstance(node, ast.Import):
            for each in node.names:
                own_modules |= (
                    {first_name(each.asname or each.name)} if _is_own(each.name) else set()
                )
                if first_name(each.name) in OUTSIDE:
                    yield Finding(f"imports {each.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if node.attr in FRAMES | INSIDE:
                yield Finding(f"reads {node.attr}: it reaches into the grading process", True)
            if node.attr == name and _root(node) in own_modules:
                yield Finding("uses the package's own part", True)
        elif isinstance(node, ast.Call):
            yield from _call(node, name, own_modules)
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.Delete):
            targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
            for target in targets:
                if isinstance(target, ast.Attribute) and _root(target) in own_modules:
                    yield Finding(f"changes minigen: {ast.unparse(target)}", True)


def _from(
    node: ast.ImportFrom, module: str, name: str, allowed: frozenset[str]
) -> Iterator[Finding]:
    if first_name(node.module or "") in OUTSIDE:
        yield Finding(f"imports {node.module}")
    for each in node.names:
        full = f"{node.module}.{each.name}"
        if each.name == name and _is_own(node.module or ""):
            yield Finding("imports the package's own part", True)
        elif (node.module == module or full == module) and full not in allowed:
            yield Finding(f"imports {full}, from the module of the package's own part")


def _call(node: ast.Call, name: str, own_modules: set[str]) -> Iterator[Finding]:
    called = node.func.id if isinstance(node.func, ast.Name) else ""
    if called in CALLS:
        yield Finding(f"calls {called}")
    texts = [each.value for each in node.args if isinstance(each, ast.Constant)]
    if called == "getattr" and name in texts:
        yield Finding("uses the package's own part, through getattr", True)
    if called in ("setattr", "delattr") and node.args and _root(node.args[0]) in own_modules:
        yield Finding(f"changes minigen: {ast.unparse(node)}", True)


def same_code(one: str, other: str) -> bool:
    """Return whether two sources are the same statements, whatever their comments and docstrings.

    >>> same_code("def f(x):\\n    return x", "def f(x):  # one\\n    return (x)")
    True
    """
    return _bare(one) == _bare(other)


def _bare(source: str) -> str:
    """Return a dump of the last definition of a source, without docstrings and annotations."""
    body = [
        node
        for node in parsed(source).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    for top in body:
        for node in ast.walk(top):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                first = node.body[0]
                if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                    node.body = node.body[1:] or [ast.Pass()]
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                node.returns = None
            if isinstance(node, ast.arg):
                node.annotation = None
    return "\n".join(ast.dump(node) for node in body)


def _is_own(module: str) -> bool:
    return first_name(module) in OWN


def first_name(dotted: str) -> str:
    """Return the package of a dotted name."""
    return dotted.partition(".")[0]


def _root(node: ast.expr) -> str:
    """Return the name that a chain of attributes begins with; an empty string if it has none."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
