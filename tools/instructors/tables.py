"""Tables of docs/instructors/syllabus.md, from plans.toml and the exercises' own figures."""

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from minigen_course.grading.hunt import HUNTS
from minigen_course.grading.question import questions, written
from minigen_course.handout.sheet import file_name, table_rows
from tools import chapter_texts
from tools.chapters import Chapter, read_chapters

PLANS = Path(__file__).with_name("plans.toml")
HUNT = "bug hunt: "


@dataclass(frozen=True)
class Task:
    """One exercise or bug hunt, as the list of exercises has it."""

    chapter: str
    name: str
    level: str
    points: int
    minutes: int

    @property
    def shown(self) -> str:
        """Its name with a link to its file, as Markdown."""
        bare = self.name.removeprefix(HUNT).strip("`")
        file = f"hunt_{bare}.py" if self.is_hunt else file_name(bare)
        return f"[{self.name}](../../exercises/{_chapters()[self.chapter].folder}/{file})"

    @property
    def is_hunt(self) -> bool:
        """Whether it is a bug hunt, which is handed out a week later."""
        return self.name.startswith(HUNT)


@dataclass(frozen=True)
class Week:
    """A week of the syllabus: its chapters, and the chapters whose bug hunts are handed out."""

    title: str
    chapters: tuple[str, ...]
    hunts: tuple[str, ...] = ()

    @property
    def assigned(self) -> list[Task]:
        """Warm-ups, core exercises, and bug hunts."""
        own = [each for number in self.chapters for each in tasks(number) if not each.is_hunt]
        late = [each for number in self.hunts for each in tasks(number) if each.is_hunt]
        return [each for each in own if each.level != "stretch"] + late

    @property
    def optional(self) -> list[Task]:
        """The exercises for those who want more."""
        return [
            each for number in self.chapters for each in tasks(number) if each.level == "stretch"
        ]


@dataclass(frozen=True)
class Row:
    """What is done in a session, and for how long."""

    what: str
    minutes: int
    points: int = 0


@dataclass(frozen=True)
class Session:
    """A timed plan; `minutes` is what its rows must add up to."""

    name: str
    start: str
    minutes: int
    rows: tuple[Row, ...] = field(default_factory=tuple)


@dataclass(frozen=True)
class _Place:
    chapter: Chapter

    @property
    def folder(self) -> str:
        return f"{self.chapter.number}_{self.chapter.stem}"

    @property
    def link(self) -> str:
        shown = f"{self.chapter.number} {self.chapter.stem.replace('_', ' ')}"
        return f"[{shown}](../../{self.chapter.notebook})"


def sections() -> dict[str, str]:
    """Return every generated section of the syllabus by the name of its markers."""
    found = {"overview": overview(), "weeks": "\n\n".join(_week(*each) for each in _numbered())}
    found |= {each.name: timed(each) for each in sessions()}
    return found | {"kinds": kinds()}


def overview() -> str:
    """Return a row per week: what is read, and what is assigned."""
    head = "| week | chapters | to read | exercises | time | points | questions | time | points |"
    rows, sums = [head, "|--:|---|--:|--:|--:|--:|--:|--:|--:|"], [0] * 7
    for number, week in _numbered():
        asked = [each for chapter in week.chapters for each in _questions(chapter)]
        figures = [
            sum(_chapters()[each].chapter.minutes[0] for each in week.chapters),
            *(len(week.assigned), _minutes(week.assigned), _points(week.assigned)),
            *(len(asked), sum(each[1] for each in asked), sum(each[0] for each in asked)),
        ]
        sums = [one + other for one, other in zip(sums, figures, strict=True)]
        linked = ", ".join(_chapters()[each].link for each in week.chapters)
        rows.append(f"| {number} | {linked} | {_figures(figures)} |")
    rows.append(f"| | **in all** | {_figures(sums)} |")
    return "\n".join(rows)


def timed(session: Session) -> str:
    """Return a session as a table with the time at which each row begins.

    Raises `ValueError` unless the rows add up to the session's minutes.
    """
    total = sum(each.minutes for each in session.rows)
    if total != session.minutes:
        raise ValueError(
            f"The rows of {session.name} add up to {total} minutes; they should make "
            f"{session.minutes}. Change the rows in {PLANS.name}."
        )
    hours, minutes = map(int, session.start.split(":"))
    now, rows = 60 * hours + minutes, ["| from | minutes | what | points |", "|---|--:|---|--:|"]
    for each in session.rows:
        rows.append(f"| {_clock(now)} | {each.minutes} | {each.what} | {each.points or ''} |")
        now += each.minutes
    points = sum(each.points for each in session.rows)
    return "\n".join([*rows, f"| {_clock(now)} | **{total}** | end | **{points or ''}** |"])


def kinds() -> str:
    """Return a row per kind of course: its chapters, and what they ask for."""
    rows = ["| course | chapters | to read | warm-up and core | stretch | why |"]
    rows.append("|---|---|--:|--:|--:|---|")
    for each in _plans()["kind"]:
        reading = sum(_chapters()[number].chapter.minutes[0] for number in each["chapters"])
        found = [task for number in each["chapters"] for task in tasks(number)]
        more = [task for task in found if task.level == "stretch"]
        rest = [task for task in found if task.level != "stretch"]
        cells = [each["name"], ", ".join(each["chapters"]), _hours(reading)]
        cells += [f"{_hours(_minutes(some))}, {_points(some)} points" for some in (rest, more)]
        rows.append(f"| {' | '.join([*cells, each['why']])} |")
    return "\n".join(rows)


def weeks() -> list[Week]:
    """Return the weeks of the syllabus."""
    return [
        Week(each["title"], tuple(each["chapters"]), tuple(each.get("hunts", ())))
        for each in _plans()["week"]
    ]


def sessions() -> list[Session]:
    """Return the timed plans."""
    return [
        Session(each["name"], each["start"], each["minutes"], tuple(map(_row, each["rows"])))
        for each in _plans()["session"]
    ]


@cache
def tasks(number: str) -> tuple[Task, ...]:
    """Return the exercises of a chapter, its bug hunts last."""
    return tuple(Task(number, *row) for row in table_rows(number))


def _week(number: int, week: Week) -> str:
    lines = [f"### Week {number}: {week.title}", ""]
    for each in week.chapters:
        place = _chapters()[each]
        lines += [
            f"- {place.link} ({place.chapter.minutes[0]} min): afterwards learners can "
            f"{chapter_texts.aim(place.chapter)}."
        ]
    lines += ["", "| assigned | level | points | time |", "|---|---|--:|--:|"]
    lines += [
        f"| {each.chapter} {each.shown} | {each.level} | {each.points} | {each.minutes} min |"
        for each in week.assigned
    ]
    lines.append(f"| **in all** | | {_points(week.assigned)} | {_minutes(week.assigned)} min |")
    if week.optional:
        more = ", ".join(f"{each.chapter} {each.shown}" for each in week.optional)
        total = f"{_points(week.optional)} points, {_minutes(week.optional)} min"
        lines += ["", f"For those who want more ({total}): {more}."]
    entries = [chapter_texts.reading(_chapters()[each].chapter) for each in week.chapters]
    lines += ["", "Reading:", ""] if entries else []
    return "\n".join([*lines, *(f"- {each}" for each in dict.fromkeys(entries))])


def _row(row: dict[str, Any]) -> Row:
    if "read" in row:
        place = _chapters()[row["read"]]
        return Row(f"Read and run {place.link}, in pairs", place.chapter.minutes[0])
    if "exercise" in row:
        number, _, name = row["exercise"].partition(" ")
        found = [each for each in tasks(number) if each.name == f"`{name}`"]
        if not found:
            raise ValueError(f"Chapter {number} has no exercise {name!r}; see {PLANS.name}.")
        shown = f"Exercise {number} {found[0].shown}"
        return Row(shown, found[0].minutes, found[0].points)
    return Row(row["what"], row["minutes"])


def _questions(number: str) -> Iterator[tuple[int, int]]:
    """Yield (points, minutes) of what an assignment asks besides the exercises."""
    for each in questions(number).values():
        yield each.points, each.minutes
    for its in written(number).values():
        yield its.points, its.minutes


def _numbered() -> Iterator[tuple[int, Week]]:
    return iter(enumerate(weeks(), 1))


def _figures(numbers: list[int]) -> str:
    reading, *rest = numbers
    count, time, points, asked, asked_time, asked_points = rest
    return (
        f"{_hours(reading)} | {count} | {_hours(time)} | {points} "
        f"| {asked} | {_hours(asked_time)} | {asked_points}"
    )


def _hours(minutes: int) -> str:
    """Return minutes as hours, to a tenth.

    >>> _hours(95)
    '1.6 h'
    """
    return f"{minutes / 60:.1f} h"


def _clock(minutes: int) -> str:
    return f"{minutes // 60:02}:{minutes % 60:02}"


def _minutes(some: Iterable[Task]) -> int:
    return sum(each.minutes for each in some)


def _points(some: Iterable[Task]) -> int:
    return sum(each.points for each in some)


@cache
def _chapters() -> dict[str, _Place]:
    return {each.number: _Place(each) for each in read_chapters()}


@cache
def _plans() -> dict[str, Any]:
    found = tomllib.loads(PLANS.read_text(encoding="utf-8"))
    for week in found["week"]:
        unknown = set(week.get("hunts", ())) - set(HUNTS)
        if unknown:
            raise ValueError(f"These chapters have no bug hunt: {', '.join(sorted(unknown))}.")
    return found
