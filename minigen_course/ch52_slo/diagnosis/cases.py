"""The eight broken systems of the chapter, diagnosed and cured.

The faults stand below. Open this file after you have tried.
"""

from collections.abc import Sequence
from dataclasses import replace

from minigen_course.ch52_slo.lesson import (
    NUM_NAMES,
    NUM_SHARED,
    SLOS,
    Case,
    Vitals,
    broken_system,
)
from minigen_course.lab.cost_model import Card
from minigen_course.lab.simulator import Ask, Knobs, Run, simulate


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
    middle = simulate(load, replace(knobs, max_num_batched_tokens=2048))
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
        "document takes about as long, but between two chunks each request gets a token. (With "
        f"2,048 only {Vitals.of(middle, tenant='chat').kept:.0%} of the chats keep both, fewer "
        "than with 8,192: each long gap is shorter, but still longer than 100 ms, and a document "
        "makes about four of them. An answer that meets two or three documents then has more than "
        "one long gap in twenty.)",
        moved="Yes: the stutter is gone, but now one document fills the token budget, and the "
        "share of chats that kept both hardly rises. Prompts are computed in order. "
        "So chats that arrive behind it miss their TTFT, though they need few tokens. Routing "
        "helps: documents go to another machine (the last column is the chats' alone). So would a "
        "scheduler that leaves chats a part of each step (vLLM: --long-prefill-token-threshold); "
        f"the documents' first tokens then come later. Of the {len(documents[0])} documents, "
        f"{first}, {second} and {third} keep 500 ms in the three columns (in the last, on a "
        "machine of their own), and the quickest first "
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
        moved="No: nothing is full any more, and all but one of the 80 requests keep both. No work "
        "is done twice, which gives tokens, too.",
    )


def idle(load: Sequence[Ask], knobs: Knobs, broken: Run) -> Case:
    """Return the case of system 4."""
    most_at_once = 64
    tokens, card = sum(len(each.prompt_ids) for each in load), Card()
    seconds = tokens * card.shape.flops(0) / card.machine.flops
    roomy = simulate(load, replace(knobs, max_num_seqs=most_at_once))
    return Case(
        "throughput low, slots empty",
        "nothing",
        "L4 batching",
        "`--scheduler` static to continuous",
        broken,
        simulate(load, replace(knobs, scheduler="continuous")),
        ("tokens per second", "the same while others wait"),
        then=f"`--max-num-seqs` 16 to {most_at_once}",
        further=simulate(load, replace(knobs, scheduler="continuous", max_num_seqs=most_at_once)),
        why="There are sixteen batch slots, and nearly half of them are empty while others wait: a "
        "static batch waits for its longest answer (chapter 24). Continuous batching refills a "
        f"slot as soon as it is free. (A static batch of {most_at_once} gives "
        f"{Vitals.of(roomy).found.output_rate:,.0f} tokens per second, more than continuous "
        "batching with sixteen slots, because it has four times as many. But a request that comes "
        "later would wait for the longest answer of the batch before.)",
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
        "any number of slots, and a priority helps then, too. So set both. "
        "Where clients could all claim the best priority, let the gateway set it.)",
        moved="Not yet: it is still the batch slots, so some chats are late. With 64 slots it "
        "moves to the token budget: every chat has its first token in time, but the job's prompts "
        f"are computed in steps of {knobs.max_num_batched_tokens:,} tokens, and "
        f"{kept_itl.count(False)} of {len(kept_itl)} chats stutter as in system 2, in more "
        "than one gap of twenty, because many such steps follow each other. The same knob helps.",
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
        "and a refused client knows at once. (Here it does not return. See the retry storms for "
        "those that do.) Why a queue of 2? A request that is admitted has at most one other before "
        "it. It waits for that one, for the prompt that is being computed, and for its own: 3 "
        "prompts of about 0.083 s are 0.25 s, if they have the mean length of 600. (A full step "
        "takes 0.067 s and has 487 tokens of prompts beside those of 25 answers, and "
        "600 / 487 x 0.067 = 0.083 s.) With a queue of 4 they are 5 prompts, or 0.42 s, and too "
        "long if they are longer than that. With a queue of 8 they are 9 prompts, or 0.75 s, "
        "which is too long. With queues of 2, 3, 4 and 8, "
        f"{kept[0]}, {kept[1]}, {kept[2]} and {kept[3]} keep both. Two, three and four do about "
        "equally well, and eight does not. "
        "(Such a limit is for a steady overload. Of ten such requests that reach an idle machine "
        "together it refuses eight, though it could serve five in time.)",
        moved="No, and it will not until there is a second machine, because no setting makes this "
        "one larger. (The L4 multiplies numbers of 8 bits twice as fast, "
        "so an engine that computes in 8 bits would serve more: chapter 35.)",
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
        why="One key's flood holds nearly all 32 batch slots and most of the queue. First come "
        "first served is fair to requests but not to people. With a limit per key, the flood gets "
        "what fits beside the others, and status 429 for the rest. Why 24 of 32? By Little's law "
        "the others need 1 per second x 60 tokens x 0.055 s = 3.3 slots on average; alone on the "
        f"machine they use {alone.most_running} at most. 24 for the flood leave them 8. With 30 "
        f"for the flood, 2 are left, and {Vitals.of(loose, tenant='other').kept:.0%} keep both. "
        "Try the layer that owns the slots, too: with `--max-num-seqs 128`, because blocks and "
        f"arithmetic are free, {roomy.kept:.0%} of all requests keep both, the flood's among them, "
        "and none is refused. But the next flood may be larger than any number of slots, and a "
        "limit per key holds then, too. So set both. (Two floods may have 24 requests each, which "
        "is more than the 32 slots: then the others wait again.)",
        moved="No: nothing is full for the others any more. The flood itself is still limited, by "
        f"its key: {Vitals.of(limited).refused} of its {num_flood} requests are refused, which "
        "the numbers above do not show, because they are the other's.",
    )


CURES = dict(enumerate((late, stutter, preempted, idle, no_hits, tail, queue, tenant), 1))
