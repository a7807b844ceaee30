"""Mutants of the package's own solutions, which the checks of the exercises must detect.

Every comparison, arithmetic operator, number, condition and `not` of a function (or of a class's
methods) is changed once.
"""

import ast
import copy
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

COMPARISONS: dict[type[ast.cmpop], list[type[ast.cmpop]]] = {
    ast.Lt: [ast.LtE, ast.GtE],
    ast.LtE: [ast.Lt, ast.Gt],
    ast.Gt: [ast.GtE, ast.LtE],
    ast.GtE: [ast.Gt, ast.Lt],
    ast.Eq: [ast.NotEq],
    ast.NotEq: [ast.Eq],
    ast.Is: [ast.IsNot],
    ast.IsNot: [ast.Is],
    ast.In: [ast.NotIn],
    ast.NotIn: [ast.In],
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}


def mutants(part: Any) -> Iterator[tuple[str, Any]]:
    """Return the mutants of a function or class, under names that describe the change."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(part)))
    seen: dict[str, int] = {}
    for place, old, new in _changes(tree):
        changed = copy.deepcopy(tree)
        _replace(changed, place, new)
        name = f"{old} -> {ast.unparse(new)}"
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > 1:
            name += f" #{seen[name]}"
        names = dict(vars(inspect.getmodule(part)))
        exec(compile(ast.fix_missing_locations(changed), "mutant", "exec"), names)
        yield name, names[part.__name__]


def _changes(tree: ast.Module) -> Iterator[tuple[int, str, ast.AST]]:
    """Yield (number of the node in ast.walk, its old text, the new node) for every change."""
    skipped = _annotations(tree)
    for place, node in enumerate(ast.walk(tree)):
        if place in skipped:
            continue
        for new in _variants(node):
            yield place, ast.unparse(node), new


def _variants(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        for other in COMPARISONS[type(node.ops[0])]:
            yield ast.Compare(node.left, [other()], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    elif isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS:
        yield ast.AugAssign(node.target, OPERATORS[type(node.op)](), node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        new = copy.copy(node)
        new.test = ast.UnaryOp(ast.Not(), node.test)
        yield new
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)


def _annotations(tree: ast.Module) -> set[int]:
    """Return the numbers of the nodes in annotations and decorators, which no check can see."""
    numbers = {id(node): place for place, node in enumerate(ast.walk(tree))}
    roots: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            roots += [*node.decorator_list, *([node.returns] if node.returns else [])]
            arguments = [*node.args.args, *node.args.kwonlyargs]
            roots += [each.annotation for each in arguments if each.annotation]
        elif isinstance(node, ast.AnnAssign):
            roots.append(node.annotation)
    return {numbers[id(node)] for root in roots for node in ast.walk(root)}


def _replace(tree: ast.Module, place: int, new: ast.AST) -> None:
    target = list(ast.walk(tree))[place]
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            if value is target:
                setattr(parent, field, copy.deepcopy(new))
            elif isinstance(value, list) and any(each is target for each in value):
                value[[each is target for each in value].index(True)] = copy.deepcopy(new)
