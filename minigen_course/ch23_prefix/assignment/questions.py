"""Questions on chapter 23 that need no code."""

from random import Random
from typing import Any

from matplotlib.figure import Figure

from minigen_course.ch23_prefix.figures import visits_figure
from minigen_course.ch23_prefix.lesson import Visits, visit
from minigen_course.figures import style
from minigen_course.grading.question import Question, Written


def _rules(random: Random) -> dict[str, Any]:
    size = random.choice((32, 64, 128))
    return {
        "num_requests": random.choice((5, 8, 10, 12)),
        "shared": size * random.randint(2, 4) + size // 2 + random.randint(4, size // 2 - 1),
        "own": random.choice((60, 90, 120, 150)),
        "block_size": size,
    }


def _hit_rate(num_requests: int, shared: int, own: int, block_size: int) -> float:
    found = (num_requests - 1) * (shared // block_size * block_size)
    return 100 * found / (num_requests * (shared + own))


def _crowd(random: Random) -> dict[str, Any]:
    return {
        "num_sequences": random.choice((20, 40, 60, 100)),
        "shared": random.choice((800, 1600, 3200)),
        "own": random.choice((80, 160, 320)),
    }


def _read_over_kept(num_sequences: int, shared: int, own: int) -> float:
    return num_sequences * (shared + own) / (shared + num_sequences * own)


def _times(random: Random) -> dict[str, Any]:
    return {
        "length": random.choice((400, 600, 800)),
        "fixed": random.choice((15, 20, 30, 40)),
        "per_token": random.choice((0.15, 0.2, 0.25, 0.3)),
    }


def _fixed_time(length: int, fixed: int, per_token: float) -> float:
    return fixed


def _times_figure(length: int, fixed: int, per_token: float) -> Figure:
    """Draw TTFT for four hits of a prompt, and write its milliseconds beside each point."""
    made, axes = style.figure(8, 3)
    found = [share * length // 4 for share in range(4)]
    times = [fixed + per_token * (length - each) for each in found]
    axes.plot(found, times, "o", color=style.BLUE)
    for x, y in zip(found, times, strict=True):
        axes.annotate(f"{y:.1f} ms", (x, y), (8, 4), textcoords="offset points", fontsize=9)
    axes.set(xlim=(-10, length), ylim=(0, 1.15 * times[0]))
    axes.set(xlabel="tokens of the prompt that were found", ylabel="milliseconds")
    style.title(axes, f"Time to first token of a prompt of {length} tokens")
    return made


RULES, HISTORY = 256, 128  # tokens

NUM_VISITS = 24

MANY = 10**6  # users, so that none comes back

LARGE = 1000  # blocks, so that nothing is evicted

SMALL_POOL, IN_FRONT = "memory is too small", "something changes in front of the rules"

BEHIND, WELL = "something changes between rules and history", "all is well"


def _traffic(random: Random) -> dict[str, Any]:
    users = random.randint(6, 10)
    cause = random.choice((SMALL_POOL, IN_FRONT, BEHIND, WELL))
    if cause == SMALL_POOL:
        pool = (RULES + users * HISTORY) // 16 // 2
        visits = visit(users, RULES, HISTORY, pool, NUM_VISITS)
    elif cause == IN_FRONT:
        visits = visit(MANY, 0, RULES + HISTORY, LARGE, NUM_VISITS)
    elif cause == BEHIND:
        visits = visit(MANY, RULES, HISTORY, LARGE, NUM_VISITS)
    else:
        visits = visit(users, RULES, HISTORY, LARGE, NUM_VISITS)
    return {"users": users, "rules": RULES, "history": HISTORY, "visits": visits}


def _cause(users: int, rules: int, history: int, visits: Visits) -> str:
    if sum(visits.evicted):
        return SMALL_POOL
    if max(visits.found) == 0:
        return IN_FRONT
    return BEHIND if max(visits.found) <= rules else WELL


def _visits_figure(users: int, rules: int, history: int, visits: Visits) -> Figure:
    return visits_figure(visits)


QUESTIONS = {
    "hit_rate": Question(
        "estimate",
        "{num_requests} requests arrive one after another. Each prompt has the same {shared} "
        "tokens, and then {own} tokens of its own; these differ from prompt to prompt from the "
        "first one on. The prefix cache keeps blocks of {block_size} tokens, is empty at first, "
        "and evicts nothing. What is the hit rate over all requests, in per cent?",
        "number of requests, shared and own tokens, block size",
        _rules,
        _hit_rate,
        "All requests but the first find {shared} // {block_size} whole blocks; the hit rate is "
        "the tokens found, as a share of all tokens of all prompts.",
        within=1.02,
    ),
    "read_and_kept": Question(
        "estimate",
        "{num_sequences} sequences decode together. They share the blocks of a prompt of "
        "{shared:,} tokens, and each has {own} tokens of its own behind it. (Both numbers are "
        "multiples of the block size.) How many times as many bytes of keys and values does a "
        "decode step read as the blocks of all these tokens take up, with an ordinary kernel, "
        "which works on each sequence alone? (Leave out what the GPU's own cache may answer.)",
        "number of sequences, shared and own tokens",
        _crowd,
        _read_over_kept,
        "The cache keeps {shared:,} + {num_sequences} x {own} tokens, and a step reads the whole "
        "context of each sequence, {num_sequences} x ({shared:,} + {own}) tokens.",
        within=1.03,
    ),
    "what_no_hit_saves": Question(
        "reading",
        "The figure shows the time to first token of a prompt of {length} tokens, of which more "
        "and more were found in the prefix cache. With c of n tokens found, TTFT is about "
        "t0 + (n - c) t1. How many milliseconds is t0, which no prefix cache can save?",
        "tokens of the prompt, and both times of the formula",
        _times,
        _fixed_time,
        "From one point to the next, TTFT falls by a quarter of n x t1; one more such step from "
        "the last point leads to t0.",
        within=1.1,
        figure=_times_figure,
    ),
    "why_not_more": Question(
        "diagnosis",
        "{users} users send requests, again and again, in random order. Each prompt should be the "
        "same rules of {rules} tokens, and then the user's history of {history} tokens, which "
        "stays the same. The figure shows the first 24 requests since the start of a "
        "server. What is the matter?",
        "number of users, what is wrong, the requests",
        _traffic,
        _cause,
        "Evictions say that memory is too small; without them, look at whether the rules are "
        "found, and whether a user's history is found when the user comes back.",
        choices=(SMALL_POOL, IN_FRONT, BEHIND, WELL),
        figure=_visits_figure,
    ),
}

WRITTEN = {
    "only_beginnings": Written(
        "Two texts contain the same paragraph, one at its beginning and one in its middle. Why "
        "can the second text not take the keys and values of the first? Which of the two reasons "
        "could be removed? What does this mean for the name of a block?",
        "A key depends on the position of its token, by the rotation, and, from the second layer "
        "on, on all tokens before it, because attention has mixed them into the token's vector; "
        "values depend on these tokens, too. The rotation could be undone and done again for "
        "another position. What the earlier tokens have done cannot be undone. So a block can be "
        "shared only if its tokens and all tokens before them are equal. Its name must say both: "
        "a hash of its tokens and of the name of the block before, or a path from the root of a "
        "tree.",
        {
            "keys depend on the position, by the rotation": 2,
            "from the second layer on, keys and values depend on all tokens before": 3,
            "only the rotation can be undone": 2,
            "a block's name covers its tokens and all tokens before (chain or path)": 3,
        },
    ),
    "order_of_eviction": Written(
        "A prefix cache evicts only blocks that no running sequence uses, and of one unused text "
        "the last block first. What would go wrong if it evicted blocks in use, too? And if it "
        "evicted the first block of a text first?",
        "The cache is one owner of each block that it keeps, beside the sequences that use it. If "
        "it evicted a block in use, it would only give up its own share: the sequence still owns "
        "the block, so no memory becomes free, and later requests can no longer find the block. A "
        "text is matched from its beginning, block by block. If its first block were evicted "
        "first, the blocks behind it would still take memory, but no request could find them "
        "until the first block is computed again.",
        {
            "the cache is only one of the owners of a block": 2,
            "evicting a block in use frees no memory, and it is no longer found": 3,
            "matching goes from the beginning, block by block": 2,
            "blocks behind an evicted one take memory and cannot be found": 3,
        },
    ),
}
