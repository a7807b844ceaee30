"""What `minigen workspace`, `progress` and `claims` show."""

import sys
from collections import Counter
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from minigen.errors import OptionError

try:
    from minigen.teach.claims import OUTCOMES, gathered
    from minigen.teach.course import make_workspace, notebooks_folder, progress
except ModuleNotFoundError as error:
    raise OptionError(
        f"The course needs {error.name}, which is not installed: pip install 'minigen[notebooks]'."
    ) from error


def print_workspace(folder: Path) -> None:
    """Make or complete a workspace, and say what is new and what to type next."""
    try:
        new = make_workspace(folder)
    except OSError as error:
        raise OptionError(f"{folder} could not be made: {error}.") from error
    for path in new:
        print(path)
    print(
        f"{len(new)} new; nothing that was there has changed. Next: jupyter lab {folder}",
        file=sys.stderr,
    )


def print_progress(folder: Path) -> None:
    """A line for each exercise as its check ends, then the first that does not pass yet."""
    console, standings = Console(highlight=False, soft_wrap=True), []
    for chapter, group in groupby(progress(folder), key=lambda each: each.chapter):
        console.print(f"[bold]chapter {chapter}[/bold]")
        for each in group:
            sign = "[green]✓[/green]" if each.passed else "[yellow]○[/yellow]"
            console.print(f"  {sign} {each.name}: {escape(each.message)}")
            standings.append(each)
    left = [each for each in standings if not each.passed]
    console.print(f"{len(standings) - len(left)} of {len(standings)} pass.", end=" ")
    if left:
        console.print(f"Next: {left[0].name}, chapter {left[0].chapter}.")
    else:
        console.print("All of them: the engine is yours.")


def print_claims(folder: Path | None) -> None:
    """All verdicts as one table, and how many there are of each."""
    found = list(gathered(notebooks_folder() if folder is None else folder))
    if not found:
        raise OptionError(f"There are no verdicts in {folder}: run its notebooks first.")
    table = Table(show_lines=True)
    for name in ("chapter", "as it is told", "found here", "verdict", "why"):
        table.add_column(name, overflow="fold")
    for chapter, each in found:
        table.add_row(chapter, *map(escape, (each.told, each.found, each.outcome, each.because)))
    Console().print(table)
    counts = Counter(each.outcome for _, each in found)
    print(f"{len(found)} claims: " + ", ".join(f"{counts[each]} {each}" for each in OUTCOMES) + ".")
