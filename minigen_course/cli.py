"""`minigen workspace`, `check`, `progress`, `claims` and `migrate`: the course's commands.

Each command imports the course's modules when it runs, because `minigen --help` loads this module
as well.
"""

import sys
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from minigen.errors import OptionError


def workspace(
    folder: Annotated[Path, typer.Argument(help="The folder to create or to complete.")],
) -> None:
    """Copy the course's notebooks and exercises into a folder of your own.

    Existing files stay unchanged, so you can repeat the command after an upgrade.

    minigen workspace ~/minigen-course
    """
    with _installed():
        from minigen_course.grading.migrate import outdated
        from minigen_course.handout.workspace import make_workspace
    try:
        new = make_workspace(folder)
    except OSError as error:
        raise OptionError(f"The folder {folder} cannot be created: {error}.") from error
    for path in new:
        print(path)
    print(
        f"New files: {len(new)}; existing files are unchanged. Next: jupyter lab {folder}",
        file=sys.stderr,
    )
    if old := outdated(folder):
        print(
            f"{len(old)} notebooks there use names of an earlier minigen, such as {old[0].name}: "
            f"minigen migrate {folder} rewrites them.",
            file=sys.stderr,
        )


def migrate(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Your workspace, or single files.")
    ],
) -> None:
    """Rewrite notebooks and saved parts that use the names of an earlier minigen.

    Only the names of modules, options and methods change that have a new name.

    The original of each changed file stays beside it, as NAME.before.

    minigen migrate ~/minigen-course

    minigen migrate my_scheduler.py
    """
    from minigen_course.grading.migrate import KEPT
    from minigen_course.grading.migrate import migrate as migrate_path

    changed = [each for path in paths for each in migrate_path(path)]
    for each in changed:
        print(f"{each} (the original is {each.name}{KEPT})")
    print(f"{len(changed)} files rewritten.", file=sys.stderr)


def check(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="A folder of exercises, a notebook, a Python file."),
    ],
    hint: Annotated[
        int, typer.Option(min=0, help="The number of hints to show for a part that does not pass.")
    ] = 0,
    seed: Annotated[
        int | None, typer.Option(help="A course's seed: parts must pass its own cases as well.")
    ] = None,
) -> None:
    """Check your answers to exercises, each in a process of its own; exit with 1 unless all pass.

    An answer is a notebook cell or a Python file with the line `# exercise: ...` of its stub.

    minigen check exercises/24_scheduler

    minigen check exercises/24_scheduler/slot_scheduler.py --hint 1
    """
    with _installed():
        from minigen_course.grading.check import print_hints
        from minigen_course.handout.workspace import check_paths

    number, num_passed = 0, 0
    for standing, hints in check_paths(paths, seed):
        print(f"{'✓' if standing.passed else '✗'} {standing.name}: {standing.message}", flush=True)
        if hint and not standing.passed:
            print_hints(hints, hint)
        number, num_passed = number + 1, num_passed + standing.passed
    print(f"{num_passed} of {number} pass.", file=sys.stderr)
    if num_passed < number:
        raise typer.Exit(1)


def progress(
    folder: Annotated[Path, typer.Argument(help="Your workspace.")] = Path(),
) -> None:
    """Check the exercises of your workspace; show which pass and which one is next."""
    with _installed():
        from minigen_course.handout.workspace import progress as standings_of
    from rich.console import Console
    from rich.markup import escape

    console, standings = Console(highlight=False, soft_wrap=True), []
    for chapter, group in groupby(standings_of(folder), key=lambda each: each.chapter):
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
        console.print("That is all of them: the engine is yours.")


def claims(
    folder: Annotated[
        Path | None, typer.Argument(help="A folder of executed notebooks (default: minigen's own).")
    ] = None,
) -> None:
    """Print the verdicts of all chapters on common claims about inference, as one table."""
    with _installed():
        from minigen_course.figures.claims import COMMON, LINK, OUTCOMES, gathered
        from minigen_course.handout.course_files import notebooks_folder
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    found = list(gathered(notebooks_folder() if folder is None else folder))
    if not found:
        raise OptionError(f"There are no verdicts in {folder}: run its notebooks first.")
    table = Table(show_lines=True)
    for name in ("chapter", "claim", "who says it", "found here", "verdict", "why"):
        table.add_column(name, overflow="fold")
    for chapter, each in found:
        source = LINK.sub(r"\1", each.source) or COMMON
        texts = (each.statement, source, each.found, each.outcome, each.because)
        table.add_row(chapter, *map(escape, texts))
    Console().print(table)
    counts = Counter(each.outcome for _, each in found)
    print(
        f"{len(found)} claims: "
        + ", ".join(f"{counts[each]} {each}" for each in OUTCOMES if counts[each])
        + "."
    )


@contextmanager
def _installed() -> Generator[None, None, None]:
    """Raise `OptionError` if a package of the course is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise OptionError(
            f"The course needs {error.name}, which is not installed: "
            "pip install 'minigen[notebooks]'."
        ) from error
