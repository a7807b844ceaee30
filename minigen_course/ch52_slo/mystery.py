"""The mystery server, unlabelled runs with one fault each and knobs to try; eight diagnoses.

The faults stand below. Open this file after you have tried.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from minigen.bench.workload import poisson
from minigen_course.ch52_slo.lesson import (
    NUM_NAMES,
    NUM_SHARED,
    SLOS,
    Case,
    System,
    Vitals,
    broken_system,
    in_order,
    num_equal,
)
from minigen_course.lab.cost_model import Card
from minigen_course.lab.simulator import Ask, Knobs, Run, asks, simulate

MEMORY_BLOCKS = Knobs().num_blocks  # as many as the card holds beside weights and working memory
NEAR = 0.8  # of the goodput that the course's own knob reaches
GOALS = {
    1: 1.59,
    2: 4.01,
    3: 0.93,
    4: 1.07,
    5: 1.3,
    6: 1.02,
}  # `NEAR` times the cures' goodput; a test computes them
NUM_FIXED = 1200  # tokens of the instructions that the prompts of seed 2 share

FLAGS = {  # flag of `minigen serve` -> the layer that owns it, the setting of the simulator
    "--max-num-seqs": ("batching", "max_num_seqs"),
    "--max-num-batched-tokens": ("batching", "max_num_batched_tokens"),
    "--scheduler": ("batching", "scheduler"),
    "--num-blocks": ("engine", "num_blocks"),
    "--kv-cache-dtype": ("engine", "kv_cache_dtype"),
    "--enable-prefix-caching": ("engine", "enable_prefix_caching"),
    "--no-enable-prefix-caching": ("engine", "enable_prefix_caching"),
    "--max-queue": ("gateway", "max_queue"),
    "--max-in-flight-per-key": ("gateway", "max_in_flight_per_key"),
}


@dataclass(frozen=True)
class Diagnosis:
    """A saturated resource, the layer whose knob mends it, and the knob: `--max-num-seqs 64`.

    `resource` is one of `RESOURCES`, `layer` one of `LAYERS`, and `knob` one of `FLAGS` with its
    value.
    """

    resource: str
    layer: str
    knob: str


def diagnose(seed: int) -> Diagnosis:
    """Return the diagnosis of the mystery server of this seed, 1 to 6.

    Its resource is the one that is saturated, its layer owns the knob, and the knob is one flag of
    `minigen serve` with a value, as in `Diagnosis("blocks", "engine", "--num-blocks 2000")`.
    """
    answers = (
        Diagnosis("batch slots", "batching", "--max-num-seqs 64"),
        Diagnosis("arithmetic", "engine", "--enable-prefix-caching"),
        Diagnosis("arithmetic", "gateway", "--max-in-flight-per-key 1"),
        Diagnosis("token budget", "batching", "--max-num-batched-tokens 512"),
        Diagnosis("nothing", "batching", "--scheduler continuous"),
        Diagnosis("blocks", "engine", "--num-blocks 3300"),
    )
    return answers[seed - 1]


package_diagnosis = diagnose  # a learner's own may replace the name


@cache
def mystery_system(seed: int) -> System:
    """Return the load and the settings of the mystery server of a seed, 1 to 6.

    Raises `ValueError` for any other seed.
    """
    rng = np.random.default_rng
    if seed == 1:
        load = asks(poisson(2.5, 80, rng(21)), (80, 300), (120, 240), seed=21)
        return started(load, slots=16, budget=8192, blocks=1200, prefix_cache=False)
    if seed == 2:
        load = asks(poisson(6, 100, rng(22)), (20, 80), (30, 90), seed=22, shared=range(NUM_FIXED))
        return started(load, slots=32, budget=512, prefix_cache=False)
    if seed == 3:
        people = asks(poisson(2, 80, rng(23)), (80, 300), (60, 120), seed=23)
        named = [replace(ask, tenant=f"user {number}") for number, ask in enumerate(people)]
        crawler = asks(poisson(1.3, 48, rng(33)), (5000, 7000), (10, 30), seed=33, tenant="crawler")
        return started(named, crawler, slots=32, budget=512, prefix_cache=False)
    if seed == 4:
        load = asks(poisson(1.5, 80, rng(24)), (1200, 2000), (60, 120), seed=24)
        return started(load, slots=24, budget=8192, blocks=2000)
    if seed == 5:
        load = asks(poisson(2, 80, rng(25)), (60, 200), (10, 200), seed=25)
        return started(
            load, scheduler="static", slots=32, budget=8192, blocks=1200, prefix_cache=False
        )
    if seed == 6:
        load = asks(poisson(1.6, 95, rng(26)), (600, 1000), (150, 300), seed=26)
        return started(load, slots=32, budget=512, blocks=1200, prefix_cache=False)
    raise ValueError(f"There are mystery servers of seed 1 to 6, and no {seed}.")


def started(
    *loads: Sequence[Ask],
    scheduler: str = "continuous",
    slots: int,
    budget: int,
    blocks: int = MEMORY_BLOCKS,
    prefix_cache: bool = True,
) -> System:
    """Return the loads and a server; an odd setting is a fault in one seed, harmless in others."""
    knobs = Knobs(scheduler, slots, budget, blocks, enable_prefix_caching=prefix_cache)
    return System(in_order(*loads), knobs)


def layer_of(knob: str) -> str:
    """Return the layer that owns a knob. Raises `ValueError` for an unknown one."""
    return FLAGS[read_knob(knob)[0]][0]


@cache
def treated(seed: int, knob: str | None = None) -> Run:
    """Return a run of a mystery server, with one knob turned if `knob` names one.

    Raises `ValueError` for a knob that is unknown, has a wrong value, or needs more memory than the
    card has.
    """
    system, card = mystery_system(seed), Card()
    if knob is None:
        return simulate(system.load, system.knobs, card)
    flag, value = read_knob(knob)
    knobs = system.knobs
    if flag == "--kv-cache-dtype":
        knobs, card = replace(knobs, num_blocks=2 * knobs.num_blocks), Card(kv_bits=8)
    else:
        changed: dict[str, Any] = {FLAGS[flag][1]: value}
        knobs = replace(knobs, **changed)
    return simulate(system.load, knobs, card)


@cache
def vitals_of(seed: int, knob: str | None = None) -> Vitals:
    """Return the vital signs of `treated(seed, knob)`."""
    return Vitals.of(treated(seed, knob))


def goodput_of(seed: int, knob: str | None = None) -> float:
    """Return the requests per second that met both objectives, with one knob turned if given."""
    found = vitals_of(seed, knob).found.goodput
    assert found is not None
    return found


def goal_of(seed: int) -> float:
    """Return the goodput that a knob must reach: `NEAR` times that of the course's diagnosis."""
    return GOALS[seed]


def command_of(knobs: Knobs) -> list[str]:
    """Return the flags with which a server was started, those that matter here."""
    cached = "" if knobs.enable_prefix_caching else "no-"
    return [
        f"--scheduler {knobs.scheduler}",
        f"--max-num-seqs {knobs.max_num_seqs}",
        f"--max-num-batched-tokens {knobs.max_num_batched_tokens}",
        f"--num-blocks {knobs.num_blocks}",
        f"--{cached}enable-prefix-caching",
    ]


def mystery(*seeds: int) -> None:
    """Print the flags, the traffic and the vital signs of mystery servers, side by side."""
    for seed in seeds:
        print(f"{seed}: minigen serve {' '.join(command_of(mystery_system(seed).knobs))}")
    columns = [{**_traffic(seed), **vitals_of(seed).rows()} for seed in seeds]
    print("\n" + " " * 30 + "".join(f"{f'seed {seed}':>11}" for seed in seeds))
    for name in columns[0]:
        print(f"  {name:<28}" + "".join(f"{column[name]:>11}" for column in columns))
    print("\nThe signs are of all keys together; a refused request keeps no objective.")
    print(f"Knobs: {', '.join(FLAGS)}.")


def try_knob(seed: int, knob: str) -> None:
    """Turn one knob of a mystery server, and print the vital signs before and after.

    Raises `ValueError` as `treated` does.
    """
    before, after = vitals_of(seed).rows(), vitals_of(seed, knob).rows()
    print(f"seed {seed}, {knob}\n")
    print(" " * 30 + f"{'before':>12}{'after':>12}")
    for name, value in before.items():
        mark = "*" if value != after[name] else " "
        print(f"{mark} {name:<28}{value:>12}{after[name]:>12}")
    goal, found = goal_of(seed), goodput_of(seed, knob)
    said = "reached" if found >= goal else "not reached"
    print(f"\nGoodput should reach {goal:.2f} requests per second: {said} ({found:.2f}).")


def _traffic(seed: int) -> dict[str, str]:
    """Return what a gateway's log says of the requests, by its name in the table."""
    load = mystery_system(seed).load
    prompts = [len(ask.prompt_ids) for ask in load]
    by_key: dict[str, int] = {}
    for ask in load:
        by_key[ask.tenant] = by_key.get(ask.tenant, 0) + len(ask.prompt_ids)
    seconds = max(ask.at for ask in load)
    return {
        "arrivals per second": f"{len(load) / seconds:.1f}",
        "prompt tokens, p50": f"{np.percentile(prompts, 50):,.0f}",
        "prompt tokens, p99": f"{np.percentile(prompts, 99):,.0f}",
        "answer tokens, mean": f"{np.mean([ask.output_tokens for ask in load]):.0f}",
        "equal first tokens": f"{num_equal(load):,}",
        "API keys": f"{len(by_key)}",
        "prompt tokens, largest key": f"{max(by_key.values()) / sum(prompts):.0%}",
    }


def read_knob(knob: str) -> tuple[str, str | int | bool]:
    """Return a knob's flag and its value. Raises `ValueError` for a knob that does not exist."""
    words = knob.split() if isinstance(knob, str) else []
    flag = words[0] if words else ""
    if flag not in FLAGS:
        raise ValueError(f"The knob is {knob!r}; it should be one of {', '.join(FLAGS)}.")
    if flag.endswith("enable-prefix-caching"):
        if len(words) > 1:
            raise ValueError(f"{flag} has no value; it should stand alone, not {knob!r}.")
        return flag, flag == "--enable-prefix-caching"
    if len(words) != 2:
        raise ValueError(f"{flag} should have one value, as in `{flag} 64`, not {knob!r}.")
    value = words[1]
    if flag == "--scheduler":
        known: tuple[str, ...] = ("continuous", "static", "dynamic")
    elif flag == "--kv-cache-dtype":
        known = ("int8",)
    else:
        if not value.isdigit() or int(value) < 1:
            raise ValueError(f"{flag} should be a number of 1 or more, not {value!r}.")
        if flag == "--num-blocks" and int(value) > MEMORY_BLOCKS:
            raise ValueError(
                f"{flag} should be at most {MEMORY_BLOCKS:,}, because the card's memory holds no "
                f"more, not {int(value):,}."
            )
        return flag, int(value)
    if value not in known:
        raise ValueError(f"{flag} should be {' or '.join(known)}, not {value!r}.")
    return flag, value


# The eight broken systems of the chapter, diagnosed and cured


def case(number: int, saturated: str | None = None, *, broken: Run) -> Case:
    """Cure a broken system, show its diagnosis, and return it as a case.

    `saturated` is your answer, one of `RESOURCES`; as long as it is None, the diagnosis is folded.
    `broken` is the run that `symptoms` returned. Raises `ValueError` for a number outside 1 to 8.
    """
    system = broken_system(number)
    made = CURES[number](system.load, system.knobs, broken)
    made.show(number, saturated)
    return made


def late(load: Sequence[Ask], knobs: Knobs, broken: Run) -> Case:
    """Return the case of system 1."""
    return Case(
        "TTFT high, ITL fine",
        "batch slots",
        "L4 batching",
        "`--max-num-seqs` 4 to 64",
        broken,
        simulate(load, replace(knobs, max_num_seqs=64)),
        ("waiting, at most", "KV cache used, at most", "TTFT p99"),
        why="Most requests wait, and yet the cache is nearly empty: there was memory for more of "
        "them, but no batch slot. A decode step of a few sequences takes as long as reading the "
        "weights, so more sequences cost the others next to nothing (ITL p50).",
        moved="No: nothing is full any more, and every request keeps both objectives.",
    )


def stutter(load: Sequence[Ask], knobs: Knobs, broken: Run) -> Case:
    """Return the case of system 2."""
    chunked = replace(knobs, max_num_batched_tokens=512)
    changed = simulate(load, chunked)
    chats = [each for each in load if each.tenant == "chat"]
    elsewhere = simulate([each for each in load if each.tenant == "document"], chunked)
    documents = [run.of("document") for run in (broken, changed, elsewhere)]
    first, second, third = (sum(SLOS[0].is_met(each) for each in run) for run in documents)
    least = min(each.ttft for run in documents for each in run if each.ttft is not None)
    return Case(
        "ITL p99 far from its p50",
        "token budget",
        "L4 batching",
        "`--max-num-batched-tokens` 8192 to 512",
        broken,
        changed,
        ("ITL p99", "ITL p50", "kept TTFT below 500 ms"),
        tenant="chat",
        then="documents go to another machine (L4 routing)",
        further=simulate(chats, chunked),
        why="A step may compute 8,192 tokens, so it computes a whole document. That takes a "
        "second, and the next token of every other request waits for it. So the token budget is at "
        "fault although no document uses it up: it is too large. (Fewer than one gap in twenty is "
        "that long, so the ITL objective does not see it. A reader does.) In chunks of 512 the "
        "document takes about as long, but between two chunks each request gets a token.",
        moved="Yes. The stutter is gone, and yet the share of chats that kept both hardly rises. "
        "Prompts are computed in order, and a document takes the whole token budget of each step. "
        "So chats that arrive behind it miss their TTFT, though they need few tokens. Routing "
        "helps: documents go to another machine. So would a scheduler that leaves chats a part of "
        "each step (vLLM: --long-prefill-token-threshold); the documents' first tokens then come "
        f"later. Of the {len(documents[0])} documents, {first}, {second} and {third} keep 500 "
        f"ms in the three columns (in the last, on a machine of their own), and the quickest first "
        f"token takes {least:.2f} s. That is their arithmetic, and no knob mends it: documents "
        "need an objective of their own, or a faster machine.",
    )


def preempted(load: Sequence[Ask], knobs: Knobs, broken: Run) -> Case:
    """Return the case of system 3."""
    int8 = Card(kv_bits=8)  # a token's keys and values have half the bytes, to keep and to read
    doubled = replace(knobs, num_blocks=2 * knobs.num_blocks)
    return Case(
        "preemptions, throughput down",
        "blocks",
        "L3 engine",
        "`--kv-cache-dtype int8`: twice the blocks",
        broken,
        simulate(load, doubled, int8),
        ("preemptions", "tokens given up", "KV cache used, at most", "kept TTFT below 500 ms"),
        why=f"All blocks are in use, so the engine preempts requests. It frees their blocks, and "
        f"computes again what the prefix cache no longer has then. Others wait, although slots are "
        f"free: a prompt enters only if there are blocks for all of it. These {knobs.num_blocks:,} "
        f"blocks are all that the card holds beside the weights, so `--num-blocks` cannot add any. "
        f"(Look there first: more blocks cost nothing if memory is left.) Keys and values in 8 "
        f"bits have half the bytes, so twice the blocks fit, and a step reads less. (The scales of "
        f"8 bits, a few percent, are left out here, and so is what the rounding costs in quality.)",
        moved="No: nothing is full any more. No work is done twice, which gives tokens, too.",
    )


def idle(load: Sequence[Ask], knobs: Knobs, broken: Run) -> Case:
    """Return the case of system 4."""
    most_at_once = 64
    tokens, card = sum(len(each.prompt_ids) for each in load), Card()
    seconds = tokens * card.shape.flops(0) / card.machine.flops
    return Case(
        "throughput low, slots empty",
        "nothing",
        "L4 batching",
        "`--scheduler` static to continuous",
        broken,
        simulate(load, replace(knobs, scheduler="continuous")),
        ("tokens per second", "running, on average"),
        then=f"`--max-num-seqs` 16 to {most_at_once}",
        further=simulate(load, replace(knobs, scheduler="continuous", max_num_seqs=most_at_once)),
        why="There are sixteen batch slots, on average half of them are empty, and still most "
        "requests wait: a static batch waits for its longest answer (chapter 24). Continuous "
        "batching refills a slot as soon as it is free.",
        moved="Yes: to the batch slots, so more of them give more tokens per second again. The "
        f"objectives stay unmet, because the {tokens:,} tokens of a hundred prompts that come at "
        f"once need {seconds:.1f} s of arithmetic, and {len(load) - most_at_once} requests still "
        f"wait when the {most_at_once} slots are full. For such a batch job the objective is "
        "wrong. No person waits for its first token, so judge it by tokens per second.",
    )


def instructions_first(ask: Ask) -> Ask:
    """Return a request of system 5 with the shared instructions before what differs."""
    ids, end = ask.prompt_ids, NUM_NAMES + NUM_SHARED
    return replace(ask, prompt_ids=(*ids[NUM_NAMES:end], *ids[:NUM_NAMES], *ids[end:]))


def no_hits(load: Sequence[Ask], knobs: Knobs, broken: Run) -> Case:
    """Return the case of system 5."""
    return Case(
        "prefix cache does not help",
        "arithmetic",
        "L6 client",
        "what differs goes behind the instructions",
        broken,
        simulate([instructions_first(each) for each in load], knobs),
        ("prefix hit rate", "arithmetic used, at most", "TTFT p99"),
        why="Every prompt holds the same 1,500 tokens, and every one of them is computed: the hit "
        "rate is 0 %. Four tokens, perhaps the user's name or the time, stand before the "
        "instructions. A prompt that differs in its first block shares nothing (chapter 23). No "
        "flag of the engine changes that: the client does.",
        moved="No: nothing is full any more.",
    )


def tail(load: Sequence[Ask], knobs: Knobs, broken: Run) -> Case:
    """Return the case of system 6."""
    polite = [replace(each, priority=int(each.tenant == "job")) for each in load]
    wide = simulate(polite, replace(knobs, max_num_seqs=64))
    roomy = simulate(load, replace(knobs, max_num_seqs=64))
    kept_itl = [SLOS[1].is_met(each) for each in wide.of("chat")]
    return Case(
        "p99 far from p50",
        "batch slots",
        "L6 client",
        "the job's `priority` 0 to 1",
        broken,
        simulate(polite, knobs),
        ("TTFT p99", "TTFT p50"),
        tenant="chat",
        then="`--max-num-seqs` 12 to 64 (L4 batching)",
        further=wide,
        why="For a while, the job's requests hold all twelve batch slots. The median does not show "
        "it. With a `priority` (larger numbers come later), a chat is first in line. But requests "
        "that run are not interrupted, so it still waits for a free slot. (64 slots alone, without "
        f"a priority, do even more here: {Vitals.of(roomy, tenant='chat').kept:.0%} of the chats "
        "keep both, because blocks and arithmetic are free. But the next job may be larger than "
        "any number of slots, and a priority helps then, too. So set both.)",
        moved="Not yet: it is still the batch slots, so some chats are late. With 64 slots it "
        "moves to the token budget: every chat has its first token in time, but the job's prompts "
        f"are computed in steps of {knobs.max_num_batched_tokens:,} tokens, and "
        f"{kept_itl.count(False)} of {len(kept_itl)} chats stutter as in system 2. The same knob "
        "helps.",
    )


def queue(load: Sequence[Ask], knobs: Knobs, broken: Run) -> Case:
    """Return the case of system 7."""
    runs = [simulate(load, replace(knobs, max_queue=most)) for most in (2, 3, 4, 8)]
    kept = [f"{Vitals.of(run).kept:.0%}" for run in runs]
    return Case(
        "queue grows",
        "arithmetic",
        "L0 silicon, and the L5 gateway protects it",
        "`--max-queue 2`: status 429 at the door",
        broken,
        runs[0],
        ("waiting, at most", "arithmetic used, at most", "refused (429)"),
        why="More prompt tokens arrive than the GPU can compute. Many of the batch slots and more "
        "than half of the blocks are free, so more of them would not help. (The last lines of this "
        "cell try more slots, and larger steps.) Refusing can hide a symptom that a knob would "
        "cure, as with too few batch slots. Here no knob of the engine serves more, and a queue "
        "only lets all requests wait. So some must be lost: refusing them serves the others well, "
        "and a refused client knows at once. Why a queue of 2? A request that is admitted has "
        "at most one other before it. It waits for that one, for the prompt that is being "
        "computed, and for its own: 3 prompts of about 0.085 s (600 / 8,062 = 0.074 s of "
        "arithmetic, and more with the overhead, attention and the answers' tokens) are 0.26 s. "
        "With a queue of 4 they are 5 prompts, or 0.43 s on average, and too long if the prompts "
        "are. With a queue of 8 they are 9 prompts, or 0.77 s, which is too long. With queues of "
        f"2, 3, 4 and 8, {kept[0]}, {kept[1]}, {kept[2]} and {kept[3]} keep both. (Such a limit is "
        "for a steady overload. Of ten requests that reach an idle machine together, it would "
        "refuse eight, which also wait for the first step only.)",
        moved="No, and it will not until there is a second machine, because no setting makes this "
        "one larger. (Arithmetic in 8 bits would, on a GPU that has it: chapter 35.)",
    )


def tenant(load: Sequence[Ask], knobs: Knobs, broken: Run) -> Case:
    """Return the case of system 8."""
    limits = (replace(knobs, max_in_flight_per_key=most) for most in (24, 30))
    limited, loose = (simulate(load, each) for each in limits)
    alone = Vitals.of(simulate([each for each in load if each.tenant == "other"], knobs))
    roomy = Vitals.of(simulate(load, replace(knobs, max_num_seqs=128)))
    num_flood = sum(each.tenant == "flood" for each in load)
    return Case(
        "one tenant starves others",
        "batch slots",
        "L5 gateway",
        "`--max-in-flight-per-key 24`",
        broken,
        limited,
        ("waiting, at most", "TTFT p99"),
        tenant="other",
        why="One key's flood holds all 32 batch slots and most of the queue. First come first "
        "served is fair to requests but not to people. With a limit per key, the flood gets what "
        "fits beside the others, and status 429 for the rest. Why 24 of 32? By Little's law the "
        "others need 1 per second x 60 tokens x 0.055 s = 3.3 slots on average; alone on the "
        f"machine they use {alone.most_running} at most. 24 for the flood leave them 8. With 30 "
        f"for the flood, 2 are left, and {Vitals.of(loose, tenant='other').kept:.0%} keep both. "
        "Try the layer that owns the slots, too: with `--max-num-seqs 128`, because blocks and "
        f"arithmetic are free, {roomy.kept:.0%} of all requests keep both, the flood's among them, "
        "and none is refused. But the next flood may be larger than any number of slots, and a "
        "limit per key holds then, too. So set both.",
        moved="No: nothing is full for the others any more. The flood itself is still limited, by "
        f"its key: {Vitals.of(limited).refused} of its {num_flood} requests are refused, which "
        "the numbers above do not show, because they are the other's.",
    )


CURES = dict(enumerate((late, stutter, preempted, idle, no_hits, tail, queue, tenant), 1))
