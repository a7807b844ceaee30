"""What an instructor wants to know of a class: the distribution, what is hard, what to read."""

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import mean, median

from minigen_course.grading.exercise import exercises
from minigen_course.grading.stub import source_of
from minigen_course.kit.grade import Graded
from minigen_course.kit.similar import Pair, alike, groups

BIN = 10  # percent: the width of a step of the distribution
MOST_NAMED = 8  # students of a group of like answers


def summary(graded: Sequence[Graded]) -> str:
    """Return what an instructor wants to know of a class, as Markdown."""
    shares = [each.share for each in graded]
    lines = [
        "# Summary",
        "",
        f"{_submissions(len(graded))}, {sum(each.late for each in graded)} late. Of all points: "
        f"{mean(shares):.0f} % on average, median {median(shares):.0f} %.",
        "",
        "## Distribution",
        "",
        *_distribution(shares),
        "",
        "## Exercises, the hardest first",
        "",
        *_hardest(graded),
        "",
        "## Not graded yet",
        "",
        *_pending(graded),
        "",
        "## Answers that are alike",
        "",
        *_groups(similar(graded)),
        "",
        "## To read",
        "",
        *_to_read(graded),
        "",
    ]
    return "\n".join(lines)


def _submissions(number: int) -> str:
    return f"{number} submission{'s' * (number != 1)}"


def _distribution(shares: Iterable[float]) -> list[str]:
    steps = Counter(min(int(each // BIN), 100 // BIN - 1) for each in shares)
    rows = [
        f"| {BIN * step} to {BIN * (step + 1)} % | {steps[step]} | {'█' * steps[step]} |"
        for step in range(100 // BIN)
    ]
    return ["| points | submissions | |", "|---|--:|---|", *rows]


def _hardest(graded: Sequence[Graded]) -> list[str]:
    """Return a row per exercise: its average, and the check that most answers fail."""
    rows = []
    for index, first in enumerate(graded[0].grades):
        grades = [each.grades[index] for each in graded if each.grades[index].is_graded]
        if not grades:
            continue
        share = mean(100 * each.earned / each.points for each in grades)
        failed = Counter(said.partition(":")[0] for each in grades for said in each.failed)
        whys = Counter(each.why for each in grades if each.why)
        common = failed.most_common(1) + whys.most_common(1)
        shown = "; ".join(f"{text} ({count})" for text, count in common).replace("|", "\\|")
        rows.append((share, f"| {first.chapter} {first.name} | {share:.0f} % | {shown} |"))
    head = ["| exercise | average | most often |", "|---|--:|---|"]
    return head + [row for _, row in sorted(rows, key=lambda each: each[0])]


def _pending(graded: Sequence[Graded]) -> list[str]:
    """Return a line per answer in words that waits for a person."""
    found: dict[str, list[str]] = {}
    for each in graded:
        for grade in each.pending:
            found.setdefault(f"{grade.chapter} {grade.name}", []).append(each.student)
    return [f"- {name}: {', '.join(students)}" for name, students in found.items()] or ["Nothing."]


def similar(graded: Sequence[Graded]) -> list[Pair]:
    """Return the pairs of answers that are alike, for all exercises."""
    found = []
    for index, first in enumerate(graded[0].grades):
        known = exercises(first.chapter).get(first.name)
        if known is None:
            continue  # a question, or a hunt: the handed-out part is most of every answer
        sources = {each.student: each.grades[index].source for each in graded}
        found += alike(
            f"{first.chapter} {first.name}",
            {student: source for student, source in sources.items() if source},
            (known.stub, source_of(known.dotted)),
        )
    return found


def _groups(pairs: Sequence[Pair]) -> list[str]:
    """Return a row per group of students with like answers; the smallest, which say most, first."""
    if not pairs:
        return ["None."]
    rows = []
    for exercise in dict.fromkeys(each.exercise for each in pairs):
        own = [each for each in pairs if each.exercise == exercise]
        for group in groups(own):
            least = min(each.share for each in own if each.one in group)
            names = sorted(group)
            shown = ", ".join(names[:MOST_NAMED])
            if len(names) > MOST_NAMED:
                shown += f" and {len(names) - MOST_NAMED} more"
            row = f"| {exercise} | {len(names)} | {shown} | {100 * least:.0f} % |"
            rows.append((len(names), row))
    head = ["| exercise | students | who | alike, at least |", "|---|--:|---|--:|"]
    return head + [row for _, row in sorted(rows, key=lambda each: each[0])]


def _to_read(graded: Sequence[Graded]) -> list[str]:
    rows = [
        f"- {each.student}, {grade.name}: {note}"
        for each in graded
        for grade in each.grades
        for note in grade.notes
    ]
    rows += [f"- {each.student}: {problem}" for each in graded for problem in each.problems]
    return rows or ["Nothing."]
