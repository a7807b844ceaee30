"""The eight broken systems, diagnosed and cured: open this file after you have tried."""

from collections.abc import Sequence
from dataclasses import replace

from minigen_course.ch52_slo.lesson import NUM_NAMES, NUM_SHARED, Case, broken_system
from minigen_course.lab.cost_model import Card
from minigen_course.lab.simulator import Ask, Knobs, Run, simulate

LONG = 1000  # tokens of a prompt that the gateway sends to another machine


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
    short = [each for each in load if len(each.prompt_ids) < LONG]
    return Case(
        "ITL p99 far from its p50",
        "token budget",
        "L4 batching",
        "`--max-num-batched-tokens` 8192 to 512",
        broken,
        simulate(load, chunked),
        ("ITL p99", "ITL p50", "kept TTFT below 500 ms"),
        then="documents go to another machine (L5 gateway)",
        further=simulate(short, chunked),
        why="A step may compute 8,192 tokens, so it computes a whole document. That takes a "
        "second, and the next token of every other request waits for it. (Fewer than one gap in "
        "twenty is that long, so the ITL objective does not see it. A reader does.) In chunks of "
        "512 the document takes as long in all, but between two chunks each request gets a token.",
        moved="Yes. The stutter is gone, and yet the share that kept both hardly rises: now the "
        "arithmetic is full while a document is computed. Prompts are computed in order, so "
        "requests that arrive behind a document miss their TTFT, and no knob of this machine "
        "helps. The gateway can: it sends documents to another machine.",
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
        ("preemptions", "tokens given up", "KV cache used, at most", "kept ITL below 100 ms"),
        then="`--max-num-batched-tokens` 2048 to 512 (L4 batching)",
        further=simulate(load, replace(doubled, max_num_batched_tokens=512), int8),
        why="All blocks are in use, so the engine preempts requests: it drops their blocks and "
        "computes their tokens again. Keys and values in 8 bits have half the bytes, so twice the "
        "blocks fit, and a step reads less. (The scales that 8 bits need, a few percent, are left "
        "out here, and so is what the rounding costs in quality.)",
        moved="Yes. Preemption is gone and the first token comes in time, but most requests "
        "still fail: each prompt of a thousand tokens is computed in one step, so the text "
        "stutters as in system 2. The same knob helps.",
    )


def idle(load: Sequence[Ask], knobs: Knobs, broken: Run) -> Case:
    """Return the case of system 4."""
    return Case(
        "throughput low, machine idle",
        "nothing",
        "L4 batching",
        "`--scheduler` static to continuous",
        broken,
        simulate(load, replace(knobs, scheduler="continuous")),
        ("tokens per second", "running, on average"),
        then="`--max-num-seqs` 16 to 64",
        further=simulate(load, replace(knobs, scheduler="continuous", max_num_seqs=64)),
        why="There are sixteen batch slots, on average half of them are empty, and still most "
        "requests wait: a static batch waits for its longest answer (chapter 24). Continuous "
        "batching refills a slot as soon as it is free.",
        moved="Yes: to the batch slots, so more of them give more tokens per second again. The "
        "objectives stay unmet, because a hundred prompts that come at once need seconds of "
        "computing. For such a batch job the objective is wrong. Nothing waits for its first "
        "token, so judge it by tokens per second.",
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
        further=simulate(polite, replace(knobs, max_num_seqs=64)),
        why="For a while, the job's requests hold all twelve batch slots. The median does not show "
        "it. With a `priority` (larger numbers come later), a chat is "
        "first in line. But requests that run are not interrupted, so it still waits for a free "
        "slot.",
        moved="No: it is still the batch slots, so some chats are late. With 64 slots nearly all "
        "chats keep both objectives.",
    )


def queue(load: Sequence[Ask], knobs: Knobs, broken: Run) -> Case:
    """Return the case of system 7."""
    return Case(
        "queue grows",
        "arithmetic",
        "L0 silicon, and the L5 gateway protects it",
        "`--max-queue 2`: status 429 at the door",
        broken,
        simulate(load, replace(knobs, max_queue=2)),
        ("waiting, at most", "arithmetic used, at most", "refused (429)"),
        why="More prompt tokens arrive than the GPU can compute. More than half of the batch slots "
        "and of the blocks are free, so more of them would not help (the last lines of this cell "
        "try it). Refusing some requests serves the others well, and a refused client knows at "
        "once.",
        moved="No, and it will not until there is a second machine, because no setting makes this "
        "one larger.",
    )


def tenant(load: Sequence[Ask], knobs: Knobs, broken: Run) -> Case:
    """Return the case of system 8."""
    return Case(
        "one tenant starves others",
        "batch slots",
        "L5 gateway",
        "`--max-in-flight-per-key 24`",
        broken,
        simulate(load, replace(knobs, max_in_flight_per_key=24)),
        ("waiting, at most", "TTFT p99"),
        tenant="other",
        why="One key's flood holds all 32 batch slots and the whole queue. First come first served "
        "is fair to requests, and not to people. With a limit per key, the flood gets what fits "
        "beside the others, and status 429 for the rest.",
        moved="No: nothing is full for the others any more. The flood itself is still limited, by "
        "its key.",
    )


CURES = dict(enumerate((late, stutter, preempted, idle, no_hits, tail, queue, tenant), 1))
