"""Shape checking for a notebook's own functions; `%load_ext minigen_course` switches it on."""

from typing import Any

from beartype import BeartypeConf, beartype

checker = beartype(conf=BeartypeConf(is_pep484_tower=True))  # accepts an int for a float


def watch(shell: Any) -> None:
    """Check the types and shapes in annotations from the next cell on."""
    shell.run_line_magic("load_ext", "jaxtyping")
    shell.run_line_magic("jaxtyping.typechecker", f"{__name__}.checker")
