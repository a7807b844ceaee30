"""Measure how the code is laid out: `python -m tools.layout` prints the table.

Modules are the files of the two packages except `__init__` and `__main__`; lines are physical
lines. tests/test_layout.py checks the limits.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

from tools.chapters import ROOT

PACKAGES = ("minigen", "minigen_course")
SHORT = 50  # lines; a module with fewer is a fragment
SHAPE = r"\b(Float|Float32|Int16|Int32|Int64|UInt8|UInt16|UInt64|Bool|Shaped)\[[\w.]+, "
TOKEN_LOOP = """minigen.engine.engine minigen.engine.scheduler minigen.engine.model_runner
minigen.sequence minigen.kv_cache.block_allocator minigen.kv_cache.block_manager
minigen.kv_cache.paged minigen.kv_cache.radix_cache minigen.model.attention minigen.model.layers
minigen.model.transformer minigen.sampling.sampler minigen.sampling.params""".split()

OPTIONS = """max_num_seqs max_num_batched_tokens block_size num_blocks kv_cache_memory
enable_prefix_caching attention_backend tensor_parallel_size
context_parallel_size""".split()
SAMPLING = ("top_p", "min_p", "presence_penalty")


@cache
def files() -> dict[str, Path]:
    """Return all Python files of the packages by dotted name; `__init__` stands for its package."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def modules() -> dict[str, Path]:
    """Return the files that count as modules."""
    return {
        name: path for name, path in files().items() if path.stem not in ("__init__", "__main__")
    }


def num_lines(path: Path) -> int:
    """Return the number of physical lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def siblings() -> Counter[str]:
    """Return the number of modules in each folder."""
    return Counter(path.parent.relative_to(ROOT).as_posix() for path in modules().values())


def imported(path: Path, *, everywhere: bool = True) -> set[str]:
    """Return the project's modules that a file imports, or only those imported at its top level."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = ast.walk(tree) if everywhere else iter(tree.body)
    found = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    own = found & files().keys()
    return {name for name in own if not any(other.startswith(name + ".") for other in own)}


def closure(start: str) -> set[str]:
    """Return the modules that importing `start` imports, by top-level imports."""
    reached, waiting = {start}, [start]
    while waiting:
        for name in imported(files()[waiting.pop()], everywhere=False) - reached:
            reached.add(name)
            waiting.append(name)
    return reached & set(modules())


def notebook_imports(package: str) -> dict[str, int]:
    """Return how many modules of a package each notebook imports."""
    return {
        path.stem: len([name for name in imported(path) if name.startswith(f"{package}.")])
        for path in sorted((ROOT / "notebooks").glob("[0-9]*.py"))
    }


def homes(name: str) -> list[str]:
    """Return the modules of minigen that give a field or an argument of this name a default."""
    return [
        module
        for module, path in modules().items()
        if module.startswith("minigen.") and name in _defaults(path)
    ]


@cache
def _defaults(path: Path) -> frozenset[str]:
    return frozenset(_with_default(ast.parse(path.read_text(encoding="utf-8"))))


def _with_default(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and node.value and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.arguments):
            ordered = [*node.posonlyargs, *node.args]
            yield from (each.arg for each in ordered[len(ordered) - len(node.defaults) :])
            pairs = zip(node.kwonlyargs, node.kw_defaults, strict=True)
            yield from (each.arg for each, default in pairs if default)


def mentions(name: str) -> list[str]:
    """Return the modules of minigen in which a name occurs as a word."""
    word = re.compile(rf"\b{name}\b")
    return [
        module
        for module, path in modules().items()
        if module.startswith("minigen.") and word.search(path.read_text(encoding="utf-8"))
    ]


def type_ignores() -> int:
    """Return the number of `type: ignore` comments."""
    marks = (path.read_text(encoding="utf-8").count("# type: ignore") for path in files().values())
    return sum(marks)


def trace_folds() -> list[str]:
    """Return the modules that compare members of `EventKind`; one that only emits has none.

    A comparison is an operand of `is`, `==` or `in`, a case of `match`, a key of a dictionary, or
    an element of a list, a tuple or a set.
    """
    member = re.compile(r"\bEventKind\.[A-Z]")
    found = []
    for name, path in modules().items():
        text = path.read_text(encoding="utf-8")
        if "EventKind" not in text:
            continue
        compared: list[ast.AST | None] = []
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Compare():
                    compared += [node.left, *node.comparators]
                case ast.MatchValue():
                    compared.append(node.value)
                case ast.Dict():
                    compared += node.keys
                case ast.List() | ast.Tuple() | ast.Set():
                    compared += node.elts
        if any(member.match(ast.unparse(each)) for each in compared if each is not None):
            found.append(name)
    return found


def shaped_functions() -> int:
    """Return the number of functions with a shape in their signature, written there or by name."""
    count = 0
    for path in files().values():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        shapes = re.compile("|".join([SHAPE, *(rf"\b{name}\b" for name in _named_shapes(tree))]))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                parts = [each.annotation for each in (*node.args.args, *node.args.kwonlyargs)]
                written = [ast.unparse(each) for each in (*parts, node.returns) if each]
                count += any(shapes.search(each) for each in written)
    return count


def _named_shapes(tree: ast.Module) -> list[str]:
    """Return the names that a module gives to shapes, such as `Logits = Float[Tensor, ...]`."""
    return [
        node.targets[0].id
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and re.search(SHAPE, ast.unparse(node.value))
    ]


def measures() -> dict[str, str]:
    """Return each measure of the layout as text."""
    from tools import http_path, request_path  # noqa: PLC0415 - they import torch

    rooms = list(request_path.record().rooms)
    served = http_path.record()
    sizes = {name: num_lines(path) for name, path in modules().items()}
    folders = siblings()
    reached = closure("minigen.llm")
    folder, most = folders.most_common(1)[0]
    numbered = [name for name in modules() if re.match(r"minigen_course\.ch\d\d_", name)]
    return {
        "modules / lines": f"{len(sizes)} / {sum(sizes.values()):,}",
        "modules at the top of minigen": str(folders["minigen"]),
        "most siblings in one folder": f"{most} ({folder})",
        "course modules with a chapter in their path": str(len(numbered)),
        "modules that a notebook imports": "up to "
        + " and ".join(f"{max(notebook_imports(each).values())} of {each}" for each in PACKAGES),
        f"modules under {SHORT} lines": str(sum(lines < SHORT for lines in sizes.values())),
        "longest module": f"{max(sizes.values())} lines",
        "closure of `from minigen import LLM`": f"{len(reached)} modules, "
        f"{sum(sizes[name] for name in reached):,} lines",
        "modules from LLM.generate to the token": f"{len(rooms)} ({', '.join(rooms)})",
        "modules from HTTP to the token / back": f"{len(served.inward)} / {len(served.back)} "
        f"({', '.join(served.inward)} / {', '.join(served.back)})",
        "token loop": f"{sum(sizes[name] for name in TOKEN_LOOP):,} lines in {len(TOKEN_LOOP)}",
        "folds over the trace": ", ".join(trace_folds()),
        "homes of an engine option": _most(homes, OPTIONS),
        "modules of a sampling parameter": _most(mentions, SAMPLING),
        "functions with shapes": str(shaped_functions()),
        "type: ignore": str(type_ignores()),
    }


def _most(found: Callable[[str], list[str]], names: Iterable[str]) -> str:
    counts = {name: len(found(name)) for name in names}
    name = max(counts, key=lambda each: counts[each])
    return f"up to {counts[name]} ({name})"


if __name__ == "__main__":
    for name, value in measures().items():
        sys.stdout.write(f"{name:<46} {value}\n")
