"""Parse a learner's cell: it may have commands of IPython, and be anything but Python."""

import ast
import re
from collections.abc import Sequence

MOST_LEVELS = 100  # of nesting: Python's own modules have at most 33
MOST_COMMANDS = 50  # that are looked at one by one: each costs a parse
COMMAND = re.compile(r"\s*[%!?]|.*\?\s*$")  # a line of IPython's, if it is no Python


def parsed(source: str) -> ast.Module:
    """Return a cell's syntax tree, without the lines that are commands of IPython (%, ! and ?).

    A line such as `% size` that continues an expression stays. Raises `SyntaxError` for a cell that
    is no Python, and for one with more than `MOST_LEVELS` of nesting, which Python itself and what
    reads the tree could not follow.

    >>> ast.unparse(parsed("%%time\\nrest = (size\\n    % 4)\\n!ls"))
    'rest = size % 4'
    """
    lines = re.split(r"\r\n?|\n", source)
    while True:
        try:
            tree = _tree("\n".join(lines))
        except SyntaxError as error:
            commands = [number for number, line in enumerate(lines, 1) if COMMAND.match(line)]
            if not commands:
                raise
            if len(commands) <= MOST_COMMANDS and error.lineno in commands:
                commands = [error.lineno]
            for number in commands:
                lines[number - 1] = ""
        else:
            _expect_shallow(tree)
            return tree


def _tree(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (RecursionError, MemoryError):
        raise SyntaxError(f"it is nested deeper than {MOST_LEVELS} levels") from None
    except UnicodeEncodeError as error:
        message = f"it has {text[error.start]!a}, one half of a character"
        place = (None, text.count("\n", 0, error.start) + 1, None, None)
        raise SyntaxError(message, place) from None
    except ValueError as error:  # null bytes, before Python 3.12
        raise SyntaxError(str(error)) from None


def _expect_shallow(tree: ast.Module) -> None:
    """Raise `SyntaxError` for a tree that is too deep for functions that call themselves."""
    level: Sequence[ast.AST] = [tree]
    for _ in range(MOST_LEVELS):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    if level:
        place = (None, getattr(level[0], "lineno", None), None, None)
        raise SyntaxError(f"it is nested deeper than {MOST_LEVELS} levels", place)


def said_of(error: SyntaxError) -> str:
    """Return what is wrong with a cell that `parsed` refuses, and where, if that is known."""
    where = f" (line {error.lineno} of the cell)" if error.lineno else ""
    return f"is no Python: {error.msg}{where}"
