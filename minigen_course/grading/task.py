"""An exercise's task, shown before it is solved, and the package's source, shown after."""

from html import escape
from typing import Any

from IPython.display import display

from minigen_course.figures.show import show
from minigen_course.grading.exercise import Exercise, exercises

SOURCE = "https://github.com/minigen/minigen/blob/main"


def task(chapter: int | str, name: str) -> None:
    """Show what an exercise asks for: its level, its statement, its hints, its harder part.

    Raises `ValueError` for a name that the chapter does not have.
    """
    found = _exercise(chapter, name)
    lines = [
        f"**{found.level.capitalize()} exercise: `{name}`.** {found.statement}",
        f"`check({int(chapter)}, {name}={name}, hint=1)` adds the first of {len(found.hints)} "
        "hints to the verdict. Each hint says more than the one before, and the last one says "
        "nearly everything.",
        f"**Harder, if you like:** {found.harder}",
    ]
    text = "\n\n".join(lines)
    display({"text/markdown": text, "text/plain": text}, raw=True)


def reveal(chapter: int | str, *names: str, **parts: Any) -> None:
    """Show the package's source of an exercise, once your own part has passed its check.

    `reveal(14, attention=mine)` opens the source if `mine`, which `check` returned, is your own
    part. `reveal(14, "attention")` opens it in any case. Raises `ValueError` for a name that the
    chapter does not have.
    """
    wanted = {**dict.fromkeys(names), **parts}
    for name, part in wanted.items():
        solution = _exercise(chapter, name).solution
        if part is not solution:
            show(solution)
            continue
        path = f"{SOURCE}/{solution.__module__.replace('.', '/')}.py"
        command = f'reveal({int(chapter)}, "{name}")'
        whose = "package's" if solution.__module__.startswith("minigen.") else "course's"
        said = f"The {whose} {name} opens here after your own has passed its check."
        opened = (
            f'<code>{escape(command)}</code> opens it now, and <a href="{path}">so does this</a>'
        )
        display(
            {
                "text/plain": f"{said} {command} opens it now; it is also at {path}",
                "text/html": f"<p>{escape(said)} {opened}.</p>",
            },
            raw=True,
        )


def _exercise(chapter: int | str, name: str) -> Exercise:
    known = exercises(f"{int(chapter):02}")
    if name not in known:
        raise ValueError(f"Chapter {chapter} has no {name}; it has {', '.join(known)}.")
    return known[name]
