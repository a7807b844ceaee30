"""What may be assigned of chapter 21: cases by seed for its exercises, and questions."""

from functools import partial
from random import Random
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minigen.kv_cache.block_allocator import BlockAllocator
from minigen_course.figures import style
from minigen_course.grading.question import Question, Written
from minigen_course.grading.varied import Varied, outcome

OWN, RESERVED = style.BLUE, style.PALE  # slots with tokens, and slots that are only reserved


def _sequences_that_fit(random: Random) -> dict[str, Any]:
    size = random.choice((4, 8, 16, 32))
    per_token = random.choice((2, 6, 10, 24))
    full = random.randint(1, 4) * size
    num_tokens = random.choice((full, full, full + random.randint(1, size - 1)))
    left = random.randint(30, 90) * per_token * size + random.randrange(per_token * size)
    weights = random.randint(3, 30) * 100
    fits = random.random() < 0.7
    return {
        "memory_bytes": weights + left if fits else weights,
        "weight_bytes": weights if fits else weights + left,
        "kv_bytes_per_token": per_token,
        "num_tokens": num_tokens,
        "block_size": size,
    }


def _block_allocator(random: Random) -> dict[str, Any]:
    num_blocks = random.randint(7, 9)
    owners: list[int] = []  # of each block, by its place in the order of allocation
    calls: list[tuple[str, Any]] = []
    for what in ("allocate", "share", *random.sample(("release", "share", "allocate"), 3)):
        if what == "allocate":
            calls.append((what, random.randint(2, 3)))
            owners += [1] * calls[-1][1]
            continue
        owned = [place for place, count in enumerate(owners) if count]
        places = sorted(random.sample(owned, random.randint(1, max(1, len(owned) - 1))))
        calls.append((what, places))
        for each in places:
            owners[each] += 1 if what == "share" else -1
    owned = [place for place, count in enumerate(owners) if count]
    calls += [
        ("allocate", num_blocks - len(owned) + 1),
        ("release", owned),
        ("release", [each for each in owned for _ in range(owners[each] - 1)]),
        ("allocate", num_blocks),
        ("release", [len(owners)]),
        (random.choice(("share", "release")), [len(owners)]),
    ]
    return {"num_blocks": num_blocks, "calls": calls}


def _called_in_turn(part: Any, num_blocks: int, calls: list[tuple[str, Any]]) -> Any:
    """Make these calls on a new allocator, and return what each has done, with `num_free` after it.

    `share` and `release` get blocks by their places, from 0, in the order of allocation. After
    `allocate` and `share` stand the owners of their blocks, and after `release` the places of the
    blocks that it returns. The last call gets a free block.
    """
    allocator, blocks, done = part(num_blocks), list[int](), list[Any]()
    for name, given in calls:
        asked = given if name == "allocate" else [blocks[place] for place in given]
        found = outcome(partial(getattr(allocator, name), asked))
        failed = isinstance(found, str)
        if failed and name != "allocate":
            done.append("an error")
            continue
        if name == "allocate" and not failed:
            blocks += found or ()
        if name == "release":
            result = sorted({place for place in given if blocks[place] in (found or ())})
        else:
            owned = found if name == "allocate" else asked
            result = found if failed else [allocator.num_owners(each) for each in owned]
        done.append((result, allocator.num_free))
    return done


def _copy_on_write(random: Random) -> dict[str, Any]:
    owners = [random.choice((1, 2, 2, 3)) for _ in range(random.randint(2, 4))]
    owners[random.randrange(len(owners))] = random.choice((2, 3))
    shared = [place for place, count in enumerate(owners) if count > 1]
    writes = [random.choice(shared), *(random.randrange(len(owners)) for _ in range(2))]
    return {"owners": owners, "num_free": random.choice((0, 1, 1, 4)), "writes": writes}


def _written(part: Any, owners: list[int], num_free: int, writes: list[int]) -> Any:
    """Write into the blocks of a table at these indexes, one after another.

    The table is 1, 2, ...; `owners` has the owners of these blocks, and `num_free` more blocks are
    free. The result is what each call returns or raises, then the table, then the owners of all
    blocks.
    """
    allocator = BlockAllocator(len(owners) + num_free)
    table = allocator.allocate(len(owners))
    for block_id, count in zip(list(table), owners, strict=True):
        allocator.share([block_id] * (count - 1))
    returned = [outcome(partial(part, allocator, table, place)) for place in writes]
    blocks = range(1, allocator.num_blocks + 1)
    return [*returned, table, [allocator.num_owners(each) for each in blocks]]


def _choose_adjacent(random: Random) -> dict[str, Any]:
    runs, block_id = [], random.randint(1, 3)
    for _ in range(random.randint(4, 5)):
        length = random.choice((1, 2, 2, 3, 3, 4))
        runs.append(list(range(block_id, block_id + length)))
        block_id += length + random.randint(1, 3)
    free = [each for run in runs for each in run]
    random.shuffle(free)
    longest = max(map(len, runs))
    count = random.choice((len(runs[-1]), len(runs[0]), longest - 1, longest + 1, longest + 2))
    return {"free": free, "count": max(1, min(count, len(free)))}


def _chosen(part: Any, free: list[int], count: int) -> Any:
    """Choose `count` of the free blocks; return them, and the list of free blocks after that."""
    return [part(free, count), free]


VARIED = {
    "sequences_that_fit": Varied(
        "bytes of memory, weights and a token; tokens per sequence; block size",
        _sequences_that_fit,
        num_cases=8,
    ),
    "BlockAllocator": Varied(
        "number of blocks, and the calls", _block_allocator, _called_in_turn, num_cases=6
    ),
    "copy_on_write": Varied(
        "owners of each block, free blocks, order of the writes",
        _copy_on_write,
        _written,
        num_cases=6,
    ),
    "choose_adjacent": Varied(
        "the free blocks, their runs and order, and the count",
        _choose_adjacent,
        _chosen,
        num_cases=8,
    ),
}


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
