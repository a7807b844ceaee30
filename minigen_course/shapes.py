"""Shape checking for a notebook's own functions; `%load_ext minigen_course` switches it on."""

import ast
import builtins
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

checker = beartype(conf=BeartypeConf(is_pep484_tower=True))  # accepts an int for a float
CHECKED = f"__import__({__name__!r}, fromlist=['checked']).checked"


def watch(shell: Any) -> None:
    """Check the types and shapes in annotations from the next cell on."""
    if not any(isinstance(each, Checks) for each in shell.ast_transformers):
        shell.ast_transformers.append(Checks())


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that also checks its arguments and its result against its annotations."""
    return jaxtyping.jaxtyped(function, typechecker=checker)


class Checks(ast.NodeTransformer):
    """Decorates a cell's functions with `checked`.

    A check takes many times as long as a call, so that functions whose annotations are Python's own
    types alone, such as `int` or `list[int]`, stay as they are.
    """

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """Decorate a function, and the functions in it."""
        self.generic_visit(node)
        if any(not hasattr(builtins, name) for name in _annotated(node)):
            decorator = ast.parse(CHECKED, mode="eval").body
            for each in ast.walk(decorator):
                ast.copy_location(each, node)
            node.decorator_list.append(decorator)
        return node


def _annotated(node: ast.FunctionDef) -> set[str]:
    """Return the names in a function's annotations."""
    arguments = [
        *(*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs),
        *(each for each in (node.args.vararg, node.args.kwarg) if each is not None),
    ]
    annotations = [node.returns, *(each.annotation for each in arguments)]
    return {
        each.id
        for annotation in annotations
        if annotation is not None
        for each in ast.walk(annotation)
        if isinstance(each, ast.Name)
    }
