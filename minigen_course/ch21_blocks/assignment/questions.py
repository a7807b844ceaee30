"""Questions on chapter 21 that need no code."""

from random import Random
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minigen_course.figures import style
from minigen_course.grading.question import Question, Written

OWN, RESERVED = style.BLUE, style.PALE  # slots with tokens, and slots that are only reserved


def _answers(random: Random) -> dict[str, Any]:
    size = random.choice((8, 16, 32))
    return {
        "block_size": size,
        "prompt": size * random.randint(2, 6) + random.randint(1, size - 1),
        "num_answers": random.choice((3, 4, 5, 6)),
        "stored": random.randint(size, 3 * size),
    }


def _blocks_of_answers(block_size: int, prompt: int, num_answers: int, stored: int) -> float:
    shared = prompt // block_size
    return shared + num_answers * (-(-(prompt + stored) // block_size) - shared)


def _reservation(random: Random) -> dict[str, Any]:
    return {
        "slots": random.choice((40_000, 60_000, 100_000)),
        "prompt": random.choice((100, 150, 250)),
        "allowed": random.choice((1024, 2048, 4096)),
        "answer": random.choice((100, 130, 190)),
        "block_size": random.choice((16, 32)),
    }


def _times_as_many(slots: int, prompt: int, allowed: int, answer: int, block_size: int) -> float:
    blocks = slots // block_size // -(-(prompt + answer) // block_size)
    return blocks / (slots // (prompt + allowed))


def _pieces(random: Random) -> list[tuple[int, int]]:
    """Return the (slots, slots with tokens) of four pieces, in slots that are multiples of 20."""
    sizes = [20 * random.randint(3, 6) for _ in range(4)]
    return [(size, size - 20 * random.randint(1, size // 20 - 1)) for size in sizes]


def _strip(random: Random) -> dict[str, Any]:
    return {
        "pieces": _pieces(random),
        "gaps": [20 * random.randint(1, 3) for _ in range(4)],
    }


def _reserved_and_empty(pieces: list[tuple[int, int]], gaps: list[int]) -> float:
    return sum(size - used for size, used in pieces)


def _strip_and_wish(random: Random) -> dict[str, Any]:
    gaps = [20 * random.randint(1, 3) for _ in range(4)]
    asked = random.choice((max(gaps), max(gaps) + 20, sum(gaps) - 20, sum(gaps) + 20))
    return {"pieces": _pieces(random), "gaps": gaps, "asked": asked}


def _why_it_waits(pieces: list[tuple[int, int]], gaps: list[int], asked: int) -> str:
    if asked <= max(gaps):
        return "it can start"
    return "external fragmentation" if asked <= sum(gaps) else "too few free slots"


def _strip_figure(pieces: list[tuple[int, int]], gaps: list[int], asked: int = 0) -> Figure:
    """Draw a memory with a gap behind each piece, over a line every 20 slots."""
    made, axes = style.figure(9, 2.3)
    first = 0
    for (size, used), gap in zip(pieces, gaps, strict=True):
        axes.broken_barh([(first, used)], (0, 1), facecolor=OWN)
        axes.broken_barh([(first + used, size - used)], (0, 1), facecolor=RESERVED)
        axes.broken_barh([(first, size)], (0, 1), facecolor="none", edgecolor=style.INK)
        first += size + gap
    axes.set(xlim=(0, first), ylim=(0, 1), yticks=[], xlabel="slot (a line every 20 slots)")
    axes.set_xticks(range(0, first + 1, 100))
    axes.set_xticks(range(0, first + 1, 20), minor=True)
    axes.grid(axis="x", which="both", color=style.QUIET, linewidth=0.5, alpha=0.6)
    looks = {"holds tokens": OWN, "reserved, empty": RESERVED, "free": "white"}
    patches = [
        Patch(facecolor=colour, edgecolor=style.QUIET, label=name) for name, colour in looks.items()
    ]
    made.legend(handles=patches, loc="outside lower left", ncols=3, frameon=False, fontsize=9)
    style.title(axes, "A memory with one piece for each request (black frames)")
    return made


QUESTIONS = {
    "blocks_of_answers": Question(
        "estimate",
        "A prompt of {prompt} tokens is asked for {num_answers} answers, in blocks of {block_size} "
        "tokens. The answers share the prompt's blocks, and copy a block before they write into it "
        "if it has other owners. How many blocks have an owner when the prompt and {stored} tokens "
        "of each answer have been stored? (There is no prefix cache.)",
        "tokens of the prompt and of the answers, number of answers, block size",
        _answers,
        _blocks_of_answers,
        "The full blocks of the prompt stay shared, and each answer owns all blocks behind them: "
        "all but one copy the prompt's last block, and the last owner keeps the original.",
        within=1.0,
    ),
    "blocks_instead": Question(
        "estimate",
        "A memory has {slots:,} slots. Each request has a prompt of {prompt} tokens, may ask for "
        "an answer of {allowed:,} tokens, and gets one of {answer} tokens. One engine reserves, in "
        "one piece, the slots of the prompt and the longest answer. Another one allocates blocks "
        "of {block_size} slots as they are needed. How many times as many requests as the first "
        "engine can the second one hold, if all requests are at their last token, which is "
        "stored, too? (Each engine holds whole requests only.)",
        "slots, tokens of prompt and answer, block size",
        _reservation,
        _times_as_many,
        "The first engine holds {slots:,} / ({prompt} + {allowed:,}) requests, and the second one "
        "needs ({prompt} + {answer}) / {block_size} blocks for each, rounded up.",
        within=1.05,
    ),
    "internal_fragmentation": Question(
        "reading",
        "The figure shows a memory in which each request has one piece. All edges are at multiples "
        "of 20 slots. How many slots are lost to internal fragmentation?",
        "sizes of the pieces, tokens in them, gaps",
        _strip,
        _reserved_and_empty,
        "Internal fragmentation is the slots that a request owns and that hold no token: the pale "
        "ones. The free slots between the pieces do not count.",
        within=1.0,
        figure=_strip_figure,
    ),
    "why_it_waits": Question(
        "diagnosis",
        "The figure shows a memory in which each request has one piece, with all edges at "
        "multiples of 20 slots. The next request asks for {asked} slots in one piece. Why does it "
        "wait, or can it start?",
        "sizes of the pieces, gaps, slots of the next request",
        _strip_and_wish,
        _why_it_waits,
        "Compare {asked} with the longest gap, which decides whether the request can start, and "
        "with the sum of all gaps, which decides whether it could start if they were adjacent.",
        choices=("it can start", "external fragmentation", "too few free slots"),
        figure=_strip_figure,
        points=3,
    ),
}

WRITTEN = {
    "with_an_oracle": Written(
        "Suppose that an engine knows the length of each answer before it is written, and reserves "
        "exactly that many slots in one piece. Why is much of its memory still empty? What do "
        "blocks change, and which new risk do they bring?",
        "A request owns all its slots from its first step on, and fills them one by one, so on "
        "average about half of the answer's slots are empty. And the pieces differ in length, so "
        "the gaps between them are often too short for the next request. With blocks, a request "
        "gets a block when its next token needs one, and any free block will do: only the end of "
        "its last block is empty. But nothing is reserved for the rest of the answer, so a running "
        "request can find no free block. Then a request is preempted, and its tokens are computed "
        "again.",
        {
            "slots are owned from the first step and filled one by one (internal)": 3,
            "pieces of many lengths leave gaps that are too short (external)": 2,
            "blocks are allocated when they are needed, and any free one fits": 3,
            "the risk: no block is free for a running request, so one is preempted": 2,
        },
    ),
    "copy_before_writing": Written(
        "Three answers to one prompt share its blocks. What goes wrong if no block is ever copied? "
        "Why are two copies enough, and when is none needed?",
        "The answers differ, but all of them would write their next token into the same slot of "
        "the shared last block, so two of them would read keys and values of another answer. So "
        "an answer that writes into a block with several owners first gets a copy of its own, and "
        "the original loses an owner. After two copies, the third answer is the only owner of the "
        "original, and may write into it. If the prompt fills its last block exactly, no answer "
        "writes into a shared block: each begins with a new one.",
        {
            "without a copy, an answer reads tokens of another one": 3,
            "the copy is made before the write, and the original loses an owner": 2,
            "the last owner writes into the original, so one copy less than answers": 3,
            "no copy if the prompt ends at the end of a block": 2,
        },
    ),
}
