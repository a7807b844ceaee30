"""Draw the running engine for the README: `python -m tools.running_picture` writes the picture.

It answers six questions with the default model, four at a time, and records the engine's events.
docs/running.svg replays them: the answers as they grow, and the owner of each block of the KV cache
at each step. The picture needs no script: every part has a CSS animation with its own times. Where
animations are switched off, it shows the last step.
"""

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from itertools import groupby

from minigen.cli.demo import QUESTIONS
from minigen.llm import LLM
from minigen.outputs import TokenDelta
from minigen.sampling.params import SamplingParams
from minigen.trace.events import Event, EventKind
from minigen_course.figures.style import CYCLE, FAINT, INK, QUIET
from tools.chapters import ROOT

PICTURE = ROOT / "docs" / "running.svg"
MOST_BYTES = 300_000
MAX_NUM_SEQS, NUM_BLOCKS, MAX_TOKENS, TURNS = 4, 40, 48, 4
PLAY_SECONDS, HOLD_SECONDS = 12, 4  # how long the run is shown, and then its end
WIDTH, HEIGHT, ROW, TOP = 860, 500, 68, 62
LINE, LINE_HEIGHT, MOST_LINES = 74, 14, 3
POOL_X, COLUMNS, CELL = 638, 5, 38
CACHED, SHARED = "#b8b8b8", "#222222"

Span = tuple[
    int, int
]  # the steps that show a part of the picture: from the first to before the last


@dataclass(frozen=True)
class Run:
    """A recorded run: `deltas` has each piece of text with the number of steps that had ended."""

    events: list[Event]
    deltas: list[tuple[int, TokenDelta]]


def record(llm: LLM, questions: tuple[str, ...] = QUESTIONS) -> Run:
    """Answer the questions with `llm`, and return what happened."""
    prompts = [llm.chat_prompt([{"role": "user", "content": each}]) for each in questions]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    deltas, num_steps = [], 0

    def count(event: Event) -> None:
        nonlocal num_steps
        num_steps += event.kind is EventKind.STEP

    with llm.record() as recorder, llm.trace.subscribed(count):
        for delta in llm.stream_deltas(prompts, params):
            deltas.append((num_steps, delta))
    return Run(recorder.events, deltas)


def picture(run: Run, questions: tuple[str, ...], subtitle: str, num_blocks: int) -> str:
    """Return the run as an SVG; raise ValueError if it has no step."""
    steps = [event for event in run.events if event.kind is EventKind.STEP]
    if not steps:
        raise ValueError("The run has no step to draw.")
    times = [event.time_ns for event in steps]
    first = times[0] - steps[0].counts["duration_ns"]
    ends = [(time - first) / (times[-1] - first) * PLAY_SECONDS for time in times]
    clock = _Clock([0.0, *ends])
    parts = [
        *_heading(subtitle),
        *_answers(run, questions, clock),
        *_pool(owners_by_step(run.events), num_blocks, clock),
        *_captions(run.events, clock),
    ]
    style = "\n".join(
        [
            "text{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:12px;"
            f"fill:{INK}}}",
            f".b{{font-weight:bold;font-size:13px}} .q{{fill:{QUIET}}} .t{{font-size:17px;"
            "font-weight:bold} .a{white-space:pre}",
            *clock.styles(),
        ]
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}" role="img" aria-labelledby="title">',
            f'<title id="title">{escape(subtitle)}</title>',
            f"<style>{style}</style>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="white" stroke="{FAINT}"/>',
            *parts,
            "</svg>\n",
        ]
    )


def owners_by_step(events: Iterable[Event]) -> list[dict[int, str]]:
    """Return what each block holds at the end of each step: a request's colour, shared, cached.

    A block without an entry is free. Requests get colours in the order of their arrival.
    """
    colours: dict[int, str] = {}
    tables: dict[int, list[int]] = {}
    cached: set[int] = set()
    found: list[dict[int, str]] = []
    for event in events:
        if event.kind is EventKind.BLOCK_EVICTED:
            cached.discard(event.counts["block"])
        elif event.kind is EventKind.STEP:
            found.append(_owners(tables, cached, colours))
        elif event.sequence_id is not None:
            if event.kind is EventKind.QUEUED:
                colours[event.sequence_id] = CYCLE[len(colours) % len(CYCLE)]
            _move(event.kind, event.counts, tables.setdefault(event.sequence_id, []), cached)
    return found


def _move(kind: EventKind, counts: Mapping[str, int], table: list[int], cached: set[int]) -> None:
    """Change a request's block table, and the blocks of the prefix cache, as an event says."""
    match kind:
        case EventKind.BLOCK_ALLOCATED | EventKind.BLOCK_SHARED:
            table.append(counts["block"])
        case EventKind.BLOCK_COPIED | EventKind.BLOCK_DEDUPLICATED:
            table[table.index(counts["source"])] = counts["block"]
        case EventKind.BLOCK_CACHED:
            cached.add(counts["block"])
        case EventKind.FINISHED | EventKind.ABORTED | EventKind.FAILED | EventKind.PREEMPTED:
            table.clear()


def _owners(
    tables: Mapping[int, list[int]], cached: set[int], colours: Mapping[int, str]
) -> dict[int, str]:
    found = dict.fromkeys(cached, CACHED)
    for sequence_id, table in tables.items():
        for block in table:
            taken = found.get(block, CACHED) != CACHED
            found[block] = SHARED if taken else colours[sequence_id]
    return found


class _Clock:
    """Gives each span of steps a CSS class whose animation shows it, and only it."""

    def __init__(self, seconds: list[float]):
        """Take the time at which each step has ended; step 0 is the beginning."""
        self._seconds = seconds
        self._names: dict[Span, str] = {}

    @property
    def num_steps(self) -> int:
        return len(self._seconds) - 1

    def during(self, span: Span) -> str:
        """Return the class of a part that is visible from the first step to before the last."""
        return self._names.setdefault(span, f"s{len(self._names)}")

    def since(self, step: int) -> str:
        """Return the class of a part that stays visible from a step on."""
        return self.during((step, self.num_steps + 1))

    def styles(self) -> list[str]:
        """Return the rules of all classes; without animations the last step is shown."""
        rules, moving = [], []
        loop = PLAY_SECONDS + HOLD_SECONDS
        for (first, end), name in self._names.items():
            last = end > self.num_steps
            rules.append(f".{name}{{visibility:{'visible' if last else 'hidden'}}}")
            frames = "" if first == 0 else "0%{visibility:hidden}"
            frames += f"{self._seconds[first] / loop:.2%}{{visibility:visible}}"
            frames += "" if last else f"{self._seconds[end] / loop:.2%}{{visibility:hidden}}"
            frames += f"to{{visibility:{'visible' if last else 'hidden'}}}"
            moving.append(f"@keyframes {name}{{{frames}}}")
            moving.append(f".{name}{{animation:{name} {loop}s step-end infinite}}")
        motion = "\n".join(moving)
        return [*rules, f"@media (prefers-reduced-motion:no-preference){{\n{motion}\n}}"]


def _text(x: float, y: float, content: str, kinds: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kinds}">{escape(content)}</text>'


def _heading(subtitle: str) -> list[str]:
    return [
        _text(22, 32, "minigen", "t"),
        _text(108, 32, subtitle, "q"),
        f'<path d="M22 44H{WIDTH - 22}" stroke="{FAINT}"/>',
    ]


def _answers(run: Run, questions: tuple[str, ...], clock: _Clock) -> list[str]:
    """Return the questions, each with its state and the pieces of its answer."""
    begins, ends = _spans(run.events)
    parts = []
    for number, question in enumerate(questions):
        colour, y = CYCLE[number % len(CYCLE)], TOP + number * ROW
        parts.append(f'<rect x="22" y="{y}" width="5" height="{ROW - 12}" fill="{colour}"/>')
        parts.append(_text(36, y + 11, question, "b"))
        states: list[tuple[str, Span]] = [
            ("running", (begins[number], ends[number])),
            ("finished", (ends[number], clock.num_steps + 1)),
        ]
        if begins[number] > 0:
            states.append(("waiting", (0, begins[number])))
        parts += [_text(540, y + 11, word, f"q {clock.during(span)}") for word, span in states]
        pieces = [(step, delta.text) for step, delta in run.deltas if delta.prompt == number]
        for line, words in enumerate(wrapped(pieces)):
            spans = "".join(
                f'<tspan class="{clock.since(step)}">{escape(word)}</tspan>' for step, word in words
            )
            baseline = y + 26 + line * LINE_HEIGHT
            parts.append(f'<text x="36" y="{baseline}" class="a">{spans}</text>')
    return parts


def wrapped(pieces: Iterable[tuple[int, str]]) -> list[list[tuple[int, str]]]:
    """Return an answer in lines, each as pieces (step, text); what does not fit is left out.

    Line ends and control characters become spaces, and several spaces become one.

    >>> wrapped([(3, "Two"), (4, " words\\n")])
    [[(3, 'Two'), (4, ' words')]]
    """
    letters: list[tuple[int, str]] = []
    for step, piece in pieces:
        for letter in piece:
            seen = letter if letter.isprintable() else " "
            if seen != " " or (letters and letters[-1][1] != " "):
                letters.append((step, seen))
    text, place, lines = "".join(letter for _, letter in letters), 0, []
    for line in textwrap.wrap(text, LINE)[:MOST_LINES]:
        place = text.index(line, place)
        on_it, place = letters[place : place + len(line)], place + len(line)
        lines.append(
            [(step, "".join(c for _, c in group)) for step, group in groupby(on_it, _step)]
        )
    return lines


def _step(letter: tuple[int, str]) -> int:
    return letter[0]


def _spans(events: Iterable[Event]) -> tuple[list[int], list[int]]:
    """Return the step before which each request began to run, and the one after which it ended."""
    order: list[int] = []
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    step = 0
    for event in events:
        if event.kind is EventKind.STEP:
            step += 1
        elif event.kind is EventKind.QUEUED and event.sequence_id is not None:
            order.append(event.sequence_id)
        elif event.kind is EventKind.SCHEDULED and event.sequence_id is not None:
            begins.setdefault(event.sequence_id, step)
        elif event.kind is EventKind.FINISHED and event.sequence_id is not None:
            ends[event.sequence_id] = step + 1  # the events of a step come before its STEP
    return [begins[each] for each in order], [ends[each] for each in order]


def _pool(owners: list[dict[int, str]], num_blocks: int, clock: _Clock) -> list[str]:
    """Return the map of the KV cache; each block has a rectangle for each of its owners in turn."""
    parts = [
        _text(POOL_X, TOP + 11, "KV cache", "b"),
        _text(POOL_X + 72, TOP + 11, f"{num_blocks} blocks", "q"),
    ]
    for block in range(1, num_blocks + 1):
        x = POOL_X + (block - 1) % COLUMNS * (CELL + 2)
        y = TOP + 20 + (block - 1) // COLUMNS * (CELL + 2)
        box = f'x="{x}" y="{y}" width="{CELL}" height="{CELL}" rx="3"'
        parts.append(f'<rect {box} fill="white" stroke="{FAINT}"/>')
        for colour, (first, end) in runs([each.get(block) for each in owners]):
            span = (first + 1, len(owners) + 1 if end == len(owners) else end + 1)
            parts.append(f'<rect {box} fill="{colour}" class="{clock.during(span)}"/>')
    y = TOP + 38 + num_blocks // COLUMNS * (CELL + 2)
    names = ((SHARED, "shared"), (CACHED, "cached"), ("white", "free"))
    for number, (colour, name) in enumerate(names):
        x = POOL_X + number * 70
        parts.append(
            f'<rect x="{x}" y="{y - 9}" width="10" height="10" rx="2" fill="{colour}" '
            f'stroke="{FAINT}"/>'
        )
        parts.append(_text(x + 15, y, name, "q"))
    return parts


def runs(values: list[str | None]) -> list[tuple[str, Span]]:
    """Return each stretch of equal values that are not None, with its first and its end place."""
    found, start = [], 0
    for place in range(1, len(values) + 1):
        if place == len(values) or values[place] != values[start]:
            value = values[start]
            if value is not None:
                found.append((value, (start, place)))
            start = place
    return found


def _captions(events: Iterable[Event], clock: _Clock) -> list[str]:
    """Return a line for each step: how many requests decode, and what it prefills."""
    parts, step = [], 0
    chunks: list[Mapping[str, int]] = []
    for event in events:
        if event.kind is EventKind.SCHEDULED:
            chunks.append(event.counts)
        elif event.kind is EventKind.STEP:
            step += 1
            prefill = [each["tokens"] for each in chunks if each["tokens"] > 1]
            words = [f"{len(chunks) - len(prefill)} decode"] if len(prefill) < len(chunks) else []
            words += [f"{len(prefill)} prefill ({sum(prefill)} tokens)"] if prefill else []
            end = step + 1 if step < clock.num_steps else clock.num_steps + 1
            caption = f"step {step} of {clock.num_steps}: {', '.join(words)}"
            parts.append(_text(22, HEIGHT - 14, caption, clock.during((step, end))))
            chunks = []
    return parts


def main() -> None:
    """Run the default model several times, draw the fastest run, and write the picture."""
    engines = [_engine() for _ in range(TURNS)]  # each has an empty prefix cache
    fastest = min((record(each) for each in engines), key=_seconds)
    seconds, threads = _seconds(fastest), engines[0].describe()["threads"]
    subtitle = (
        f"six questions, {MAX_NUM_SEQS} at a time, on {threads} CPU cores: {len(fastest.deltas)} "
        f"tokens in {seconds:.2f} s, shown {PLAY_SECONDS / seconds:.0f} times slower"
    )
    text = picture(fastest, QUESTIONS, subtitle, NUM_BLOCKS)
    PICTURE.write_text(text, encoding="utf-8")
    print(f"written: {PICTURE.relative_to(ROOT)}, {len(text.encode())} bytes")


def _engine() -> LLM:
    """Return the default model with few blocks, its compiled code loaded."""
    llm = LLM.load(weights="int4", max_num_seqs=MAX_NUM_SEQS, num_blocks=NUM_BLOCKS)
    llm.generate("Hello", SamplingParams(max_tokens=4))
    return llm


def _seconds(run: Run) -> float:
    return (run.events[-1].time_ns - run.events[0].time_ns) / 1e9


if __name__ == "__main__":
    main()
