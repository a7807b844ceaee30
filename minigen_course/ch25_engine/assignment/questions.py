"""Questions on chapter 25 that need no code."""

from random import Random
from typing import Any

from matplotlib.figure import Figure

from minigen_course.ch24_scheduler.lesson import ChunkingScheduler
from minigen_course.figures import style
from minigen_course.grading.question import Question, Written
from minigen_course.lab.toy_engine import SchedulerBench


def _mixed_step(random: Random) -> dict[str, Any]:
    return {
        "decodes": random.randint(6, 20),
        "middle": random.choice((100, 200, 300)),
        "end": random.choice((20, 40, 60)),
        "vocabulary": random.choice((32_000, 49_152, 128_256, 151_936)),
    }


def _logits_megabytes(decodes: int, middle: int, end: int, vocabulary: int) -> float:
    return (decodes + 1) * vocabulary * 4 / 1e6


def _prompts_at_once(random: Random) -> dict[str, Any]:
    return {
        "count": random.choice((4, 5, 6)),
        "prompt": random.choice((50, 60, 70, 90)),
        "budget": random.choice((64, 80)),
        "short": random.choice((20, 25)),
        "long": random.randint(40, 60),
    }


def _num_steps(count: int, prompt: int, budget: int, short: int, long: int) -> float:
    bench = SchedulerBench(ChunkingScheduler, max_num_seqs=count, budget=budget, num_blocks=1000)
    for number in range(count):
        bench.arrive(prompt, long if number == count - 1 else short)
    bench.drain(1000)
    return len(bench.batches)


WAYS = (
    *("no cache, one by one", "cache, one by one", "static batches of 16"),
    *("continuous, 16 at once", "continuous, 32 at once"),
)


def _rates(random: Random) -> dict[str, Any]:
    cached = random.randint(20, 60)
    gains = [random.uniform(2.5, 4), random.uniform(1.2, 2), random.uniform(1.2, 1.6)]
    rates = [round(cached / random.uniform(5, 12)), cached]
    for gain in gains:
        rates.append(round(rates[-1] * gain))
    return {"rates": rates}


def _shared_steps(rates: list[int]) -> float:
    return rates[-1] / rates[1]


def _rates_figure(rates: list[int]) -> Figure:
    """Draw a bar for each way to serve the same requests, with its number."""
    made, axes = style.figure(8, 3)
    bars = axes.barh(WAYS, rates, color=style.BLUE)
    axes.bar_label(bars, padding=3, fontsize=9)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.1 * max(rates)), xlabel="output tokens per second")
    style.title(axes, "Five ways to serve the same requests")
    return made


UNCOMMITTED = "a chunk without a token is not committed"

EARLY = "tokens are delivered before commit"

KEPT = "finished requests stay live"

WELL = "no mistake"


def _loop_log(random: Random) -> dict[str, Any]:
    budget = random.choice((8, 16, 32))
    return {
        "prompt": 2 * budget + random.randint(1, budget - 1),
        "answer": random.randint(2, 4),
        "budget": budget,
        "mistake": random.choice((UNCOMMITTED, EARLY, KEPT, WELL)),
    }


def _mistake(prompt: int, answer: int, budget: int, mistake: str) -> str:
    return mistake


def _log_text(prompt: int, answer: int, budget: int, mistake: str) -> str:
    """Return a table of the steps of a loop with this mistake."""
    lines = ["step   positions computed   tokens delivered   finish_reason   ids in live"]
    computed = 0
    for step in range(2 + answer):
        if computed < prompt:
            first, last = computed, min(computed + budget, prompt) - 1
        else:
            first = last = computed
        gets_token = last >= prompt - 1
        if gets_token or mistake != UNCOMMITTED:
            computed = last + 1
        ends = step == 1 + answer and mistake != UNCOMMITTED
        reason = "length" if ends and mistake != EARLY else "None"
        live = "none" if ends and mistake != KEPT else "1"
        places = f"{first} to {last}" if first < last else f"{last}"
        lines.append(
            f"{step:>4}   {places:>18}   {int(gets_token):>16}   "
            f"{reason if gets_token else '-':>13}   {live:>11}"
        )
    return "\n".join(lines)


QUESTIONS = {
    "bytes_of_logits": Question(
        "estimate",
        "A step computes {decodes} decodes, a chunk of {middle} tokens from the middle of a "
        "prompt, and a chunk of {end} tokens that ends another prompt. No request asks for the "
        "probabilities of its prompt, and none for several answers. The vocabulary has "
        "{vocabulary:,} tokens. How many MB (10^6 bytes) do the logits take that the runner "
        "returns, in float32?",
        "decodes, both chunks, vocabulary",
        _mixed_step,
        _logits_megabytes,
        "Only sequences whose next token is due get a row: {decodes} decodes and the chunk that "
        "ends its prompt, with {vocabulary:,} numbers of 4 bytes each.",
        within=1.02,
    ),
    "steps_of_a_burst": Question(
        "estimate",
        "{count} requests with prompts of {prompt} tokens arrive before the first step. There are "
        "batch slots and blocks for all. A step has at most {budget} tokens: first one for each "
        "decode, then chunks of the prompts, in order. The last request wants {long} tokens, the "
        "others {short} each. In how many steps are all of them answered?",
        "number of requests, tokens of prompts and answers, token budget",
        _prompts_at_once,
        _num_steps,
        "Find the step that ends the last prompt: it gives the first of the {long} tokens, so "
        "{long} - 1 more steps follow.",
        within=1.0,
        points=8,
        minutes=10,
    ),
    "gain_of_sharing": Question(
        "reading",
        "The figure shows five ways to serve the same requests with the same model and the same "
        "kernels. How many times the throughput of an honest baseline does the last way have? "
        "(Honest: what a server that takes one request at a time would do.)",
        "the throughput of each way",
        _rates,
        _shared_steps,
        "No server works without a KV cache, so the baseline is the second bar, and the gain is "
        "that of shared steps alone.",
        within=1.02,
        figure=_rates_figure,
        points=3,
    ),
    "what_the_loop_forgets": Question(
        "diagnosis",
        "One request, with the id 1, a prompt of {prompt} tokens and an answer of {answer}, runs "
        "in an engine's loop with {budget} tokens per step. The table shows the first steps: the "
        "positions that were computed, the number of tokens delivered, `finish_reason` when the "
        "token was delivered, and the ids in `live` after the step. Which mistake does the loop "
        "have, if any?",
        "tokens of prompt and answer, token budget, the mistake",
        _loop_log,
        _mistake,
        "Each step must go on where the last one ended, the last token must be delivered with its "
        "`finish_reason`, and `live` must be empty after it.",
        choices=(UNCOMMITTED, EARLY, KEPT, WELL),
        figure=_log_text,
    ),
}

WRITTEN = {
    "order_of_the_calls": Written(
        "An engine's step makes four calls: `schedule`, `logits`, the sampler, `commit`. Why must "
        "`samples_of(chunks)` be asked before `commit`? Why is a chunk committed that gives no "
        "token? Why is a token delivered only after `commit`?",
        "A chunk gives a token only if it reaches the end of what is known of its sequence. "
        "`commit` counts the chunk as computed and appends the new token, so afterwards the same "
        "question can have another answer. A chunk from the middle of a prompt gives no token, but "
        "its keys and values are stored; if it were not committed, it would not count as computed, "
        "and the next step would compute the same positions again, for ever. `commit` also sets "
        "`finish_reason`: delivered earlier, the last token would not say that the answer is "
        "complete.",
        {
            "commit counts chunks as computed, which changes what samples_of returns": 4,
            "without its commit, a middle chunk is computed again and again": 3,
            "finish_reason is set by commit, and must come with the last token": 3,
        },
    ),
    "twenty_times_as_fast": Written(
        "A project says that its engine is 20 times as fast as naive serving. Its baseline "
        "computes the whole text again for each token, one request after the other. Which two "
        "gains are multiplied here, and on what does each depend? Which baseline would be honest, "
        "and which user would not notice the gain?",
        "The first gain is that of a KV cache: without it, every token computes the whole text "
        "again, so the gain grows with the length of the texts. The second one is that of shared "
        "steps: many sequences use one reading of the weights, so the gain grows with the number "
        "of requests at once, until a step is limited by its arithmetic. No server works without "
        "a cache, so the honest baseline serves with one. A user who is alone on the machine "
        "shares no step, and gains nothing from that part.",
        {
            "the gain of the cache, which grows with the length of the texts": 3,
            "the gain of shared steps, which grows with the requests at once, to a limit": 3,
            "the honest baseline keeps a KV cache": 2,
            "a single user shares no step": 2,
        },
    ),
}
