"""`minigen workspace`, `progress` and `claims`: the course on the command line."""

from pathlib import Path
from typing import Annotated

import typer


def workspace(
    folder: Annotated[Path, typer.Argument(help="The folder to make, or to complete.")],
) -> None:
    """Copy the course's notebooks and exercises into a folder of your own.

    What is there already is left as it is, so repeat it after an upgrade.

    minigen workspace ~/minigen-course
    """
    from minigen.terminal.course import print_workspace

    print_workspace(folder)


def progress(
    folder: Annotated[Path, typer.Argument(help="Your workspace.")] = Path(),
) -> None:
    """Check the exercises of your workspace: what passes, and what is next."""
    from minigen.terminal.course import print_progress

    print_progress(folder)


def claims(
    folder: Annotated[
        Path | None, typer.Argument(help="A folder of executed notebooks; else minigen's own.")
    ] = None,
) -> None:
    """Print what the chapters found of what is told about inference: one table of all verdicts."""
    from minigen.terminal.course import print_claims

    print_claims(folder)
