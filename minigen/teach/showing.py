"""A package's source in a notebook, highlighted, as it is."""

import inspect
from typing import Any

from IPython.display import Code, display

MONOSPACE = '<pre style="font-family: monospace">'  # which exported pages forget


def show(*objects: Any) -> None:
    """Show the source of functions, classes or modules of the package, one after another.

    Raises `TypeError` for what has no Python source.
    """
    for each in objects:
        where = inspect.getmodule(each)
        name = getattr(each, "__qualname__", "")
        head = f"# {where.__name__}.{name}\n" if where is not None and name else ""
        source = head + inspect.getsource(each).rstrip()
        html = Code(source, language="python")._repr_html_().replace("<pre>", MONOSPACE)
        display({"text/plain": source, "text/html": html}, raw=True)
