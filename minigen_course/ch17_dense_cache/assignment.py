"""What may be assigned of chapter 17: cases by seed for its exercises, and questions."""

from random import Random
from typing import Any

import torch
from matplotlib.figure import Figure

from minigen.sampling.params import SamplingParams
from minigen.sequence import Sequence
from minigen_course.figures import style
from minigen_course.grading.question import Question, Written
from minigen_course.grading.varied import Varied, normal
from minigen_course.lab.small_model import KV_HEADS, VOCAB, recording_model

LAYERS, HEADS, DIM = 2, 2, 2


def _dense_cache(random: Random) -> dict[str, Any]:
    lengths = [random.randint(1, 3), 1, random.randint(1, 2)]
    return {
        "lengths": lengths,
        "dtype": random.choice((torch.float32, torch.bfloat16)),
        "layer_id": random.randrange(LAYERS),
        "keys": normal(random, sum(lengths), HEADS, DIM),
        "values": normal(random, sum(lengths), HEADS, DIM),
    }


def _stored(
    part: Any,
    lengths: list[int],
    dtype: torch.dtype,
    layer_id: int,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> list[Any]:
    """Store keys and values in a cache of two layers, `lengths` of them in each step.

    Layer 0 gets them as they are, layer 1 with the opposite sign, and the cache of another sequence
    gets them doubled. What was given to `store` is overwritten afterwards. The result has
    `num_tokens` after each step, and what the last step returns for layer `layer_id`.
    """
    cache, other = (part(LAYERS, sum(lengths) + 1, HEADS, DIM, dtype) for _ in range(2))
    counts, found, begin = [], [], 0
    for length in lengths:
        new = [each[begin : begin + length] for each in (keys, values)]
        given = []
        for number in range(LAYERS):
            k, v = ((-1) ** number * each for each in new)
            other.store(number, 2 * k, 2 * v)
            returned = cache.store(number, k, v)
            given += [k, v]
            if number == layer_id:
                found = [returned[0].clone(), returned[1].clone()]
        for each in (cache, other):
            each.advance(length)
        for tensor in given:
            tensor.zero_()
        counts.append(cache.num_tokens)
        begin += length
    return [counts, *found]


def _window_cache(random: Random) -> dict[str, Any]:
    window = random.choice((2, 3))
    numbers = random.sample(range(1, 60), 2 * (2 * window + 1))
    return {
        "window": window,
        "keys": numbers[::2],
        "values": numbers[1::2],
        "dtype": random.choice((torch.float32, torch.bfloat16)),
    }


def _windows(
    part: Any, window: int, keys: list[int], values: list[int], dtype: torch.dtype
) -> list[Any]:
    """Store tokens one by one in a cache of two layers; all numbers of a key or a value are equal.

    Layer 0 gets the keys and values that are shown, layer 1 larger ones. What was given to `store`
    is overwritten afterwards. The result has the dtype of the keys, and for each token the pairs
    of a key and a value that layer 0 returned, sorted.
    """
    cache, found, kind = part(LAYERS, window, 1, DIM, dtype), [], ""
    for key, value in zip(keys, values, strict=True):
        given = []
        for number in range(LAYERS):
            k, v = (torch.full((1, 1, DIM), each + 100.0 * number) for each in (key, value))
            returned = cache.store(number, k, v)
            given += [k, v]
            if number == 0:
                kind = str(returned[0].dtype)
                pairs = zip(returned[0][:, 0, 0], returned[1][:, 0, 0], strict=True)
                found.append(sorted([int(k), int(v)] for k, v in pairs))
        cache.advance()
        for tensor in given:
            tensor.zero_()
    return [kind, found]


def _dense_runner(random: Random) -> dict[str, Any]:
    def text(length: int) -> list[int]:
        return [random.randrange(VOCAB) for _ in range(length)]

    return {
        "prompts": [text(random.randint(*most)) for most in ((4, 6), (1, 3), (2, 4))],
        "answers": [text(2) for _ in range(2)],
        "windows": random.choice(((None, 3), (3, None), (2, None, 4), (None, 4, 2))),
    }


def _run_steps(
    part: Any,
    prompts: list[list[int]],
    answers: list[list[int]],
    windows: tuple[int | None, ...],
) -> list[Any]:
    """Run three steps on `recording_model(windows)` of `minigen_course.lab.small_model`.

    Steps 1 and 2 run the first two prompts. Whatever the logits say, the tokens in `answers` are
    appended, one after each step. Then the first sequence is released, and step 3 runs the third
    prompt, which has got the first one's id, together with the second sequence. The result has the
    positions that the model computed in each step, sorted, and the logits of each step.
    """
    model = recording_model(windows)
    runner = part(model, KV_HEADS, windows)
    first, second, third = (
        Sequence(number, tuple(ids), SamplingParams(temperature=0.0), 0, 4, frozenset())
        for number, ids in zip((1, 2, 1), prompts, strict=True)
    )
    positions, logits = [], []
    for running in ([first, second], [first, second], [third, second]):
        if third in running:
            runner.release(first)
        seen = len(model.steps)
        logits.append(runner.logits(running))
        positions.append(sorted(each for _, found in model.steps[seen:] for each in found))
        for sequence, answer in zip((first, second), answers, strict=True):
            if sequence in running and len(sequence.output_ids) < len(answer):
                sequence.num_computed = len(sequence)
                sequence.append(answer[len(sequence.output_ids)])
    return [positions, logits]


def _cards(random: Random) -> dict[str, Any]:
    return {"context": random.choice((1, 100, 1000, 8000)), "cards": random.randint(2, 20)}


def _on_cards(part: Any, context: int, cards: int) -> Any:
    """Multiply the batch for this context by the number of cards; None stays None."""
    found = part(context)
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    return float(cards * found) if is_number else found


def _step(random: Random) -> dict[str, Any]:
    """Return a step of any kind: a small batch of long texts, or a large one of short texts."""
    batch, context = random.choice(
        ((random.randint(2, 30), 500 * random.randint(2, 16)), (100 * random.randint(4, 9), 20))
    )
    return _machine(random) | {"batch": batch, "context": context}


def _machine(random: Random) -> dict[str, Any]:
    kv_heads, group = random.choice(((8, 4), (8, 5), (4, 8)))
    bandwidth = random.choice((3e11, 6e11, 1e12, 2e12))
    return {
        "weights": 1e9 * random.choice((1.5, 3, 7, 8, 14)),
        "layers": random.choice((24, 32, 40)),
        "q_heads": kv_heads * group,
        "kv_heads": kv_heads,
        "head_dim": random.choice((64, 128)),
        "bandwidth": bandwidth,
        "peak": bandwidth * random.choice((60, 80, 100)),
        "weight_bits": random.choice((4.5, 8, 8.5)),
        "kv_bits": random.choice((8, 16)),
        "overhead": random.choice((0.001, 0.002, 0.005, 0.01)),
    }


def _prompt(random: Random) -> dict[str, Any]:
    """Return a prompt that may be short, and then waits for memory."""
    tokens = random.choice((random.randint(4, 12), 100 * random.randint(5, 40)))
    given = _machine(random) | {"prompt_tokens": tokens}
    return given | {"head": round(given["weights"] / random.randint(10, 20), -6)}


def _milliseconds(part: Any, **given: Any) -> Any:
    """Convert the seconds that the part returns to milliseconds."""
    found = part(**given)
    return 1e3 * found if isinstance(found, int | float) else found


VARIED = {
    "DenseCache": Varied("tokens of each step, dtype, keys and values", _dense_cache, _stored),
    "WindowCache": Varied("window, keys and values, dtype", _window_cache, _windows),
    "DenseRunner": Varied("prompts, tokens, windows", _dense_runner, _run_steps, tolerance=1e-3),
    "compute_bound_batch": Varied(
        "which of the four contexts, number of cards", _cards, _on_cards, tolerance=0.05
    ),
    "step_seconds": Varied("model, card, batch, context, bits", _step, _milliseconds, 1e-6),
    "prefill_seconds": Varied("model, card, prompt, bits", _prompt, _milliseconds, 1e-6),
}


def _server(random: Random) -> dict[str, Any]:
    """Return a decode step whose keys and values are a third of the weights at least."""
    while True:
        drawn = {
            "billions": random.choice((3, 7, 8, 14)),
            "bits": random.choice((8, 16)),
            "layers": random.choice((24, 32, 40)),
            "kv_heads": random.choice((4, 8)),
            "head_dim": random.choice((64, 128)),
            "batch": random.choice((8, 16, 32, 64)),
            "context": random.choice((1000, 2000, 4000, 6000)),
            "bandwidth": random.choice((300, 900, 2000, 3000)),
        }
        weights, kv = _gigabytes(**drawn)
        if weights / 3 < kv < 2 * weights:
            return drawn


def _gigabytes(
    billions: int,
    bits: int,
    layers: int,
    kv_heads: int,
    head_dim: int,
    batch: int,
    context: int,
    bandwidth: int,
) -> tuple[float, float]:
    """Return how many GB of weights, and of keys and values, the step reads."""
    return billions * bits / 8, 2 * layers * kv_heads * head_dim * 2 * batch * context / 1e9


def _throughput(**given: int) -> float:
    return given["batch"] / (sum(_gigabytes(**given)) / given["bandwidth"])


def _card(random: Random) -> dict[str, Any]:
    return {
        "ridge": random.choice((20, 30, 40, 60, 80, 100, 200, 300, 400)),
        "peak": random.choice((50, 100, 200, 400, 1000)),
        "bits": random.choice((8, 32)),
    }


def _tokens_at_ridge(ridge: int, peak: int, bits: int) -> float:
    return ridge * bits / 8 / 2


def _roofline(ridge: int, peak: int, bits: int) -> Figure:
    """Draw both limits on logarithmic axes."""
    made, axes = style.figure(8, 4)
    intensities = [1, ridge, 1000]
    axes.loglog(intensities, [min(each / ridge, 1) * peak for each in intensities], linewidth=2)
    axes.set_yticks([], minor=True)
    axes.grid(which="both", color=style.FAINT, linewidth=0.7)
    axes.set_xlim(1, 1000)
    axes.set_ylim(peak / 1000, 2 * peak)
    ticks = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
    axes.set_xticks(ticks, [f"{each:,}" for each in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xticks([each * power for power in (1, 10, 100) for each in range(2, 10)], minor=True)
    axes.tick_params(which="minor", labelbottom=False)
    levels = [peak / 1000, peak / 100, peak / 10, peak]
    axes.set_yticks(levels, [f"{each:g}" for each in levels])
    axes.set_xlabel("arithmetic intensity (FLOP per byte); lines at 1, 2, 3, ... 10, 20, 30, ...")
    axes.set_ylabel("TFLOP/s")
    style.title(axes, "Roofline of a card")
    return made


CHANGES = WEIGHTS, KV, FLOPS, OVERHEAD = (
    "weights of half the bits",
    "keys and values of half the bits",
    "twice the flop/s",
    "half the overhead",
)


MOST_GIGABYTES = 75  # of a card


def _step_of(
    batch: int,
    weights: int,
    kv: int,
    tflop: float,
    bandwidth: int,
    peak: int,
    overhead: int,
    change: str = "",
) -> float:
    """Return the milliseconds of a step, or of the step after one of the changes."""
    read = weights / (1 + (change == WEIGHTS)) + kv / (1 + (change == KV))
    compute = tflop / (1 + (change == FLOPS))
    longer = max(read / bandwidth, compute / peak)
    return 1e3 * longer + overhead / (1 + (change == OVERHEAD))


def _slow_step(random: Random) -> dict[str, Any]:
    """Return a step that one of the changes shortens clearly more than the others."""
    wanted = random.choice(CHANGES)
    while True:
        batch, weights = random.choice((32, 64, 128, 256, 512)), random.randint(3, 16)
        drawn: dict[str, Any] = {
            "batch": batch,
            "weights": weights,
            "kv": max(1, round(batch * random.choice((0.01, 0.03, 0.1, 0.3)))),
            "tflop": max(0.1, round(weights * batch / 1000, 1)),  # 2 FLOPs for each 2 bytes
            "bandwidth": random.choice((300, 600, 900, 2000)),
            "peak": random.choice((100, 200, 400)),
            "overhead": random.randint(2, 30),
        }
        gained = {each: _step_of(**drawn) - _step_of(**drawn, change=each) for each in CHANGES}
        second, first = sorted(gained.values())[-2:]
        fits = weights + drawn["kv"] <= MOST_GIGABYTES
        if fits and gained[wanted] == first > max(2, 1.5 * second):
            return drawn


def _best_change(**drawn: Any) -> str:
    return min(CHANGES, key=lambda change: _step_of(**drawn, change=change))


def _profile(**drawn: Any) -> str:
    rows = {
        "sequences in the batch": f"{drawn['batch']}",
        "one decode step, measured": f"{_step_of(**drawn):.1f} ms",
        "weights that it reads": f"{drawn['weights']} GB",
        "keys and values that it reads": f"{drawn['kv']} GB",
        "its arithmetic": f"{drawn['tflop']} TFLOP",
        "the card reads": f"{drawn['bandwidth']} GB/s",
        "the card computes": f"{drawn['peak']} TFLOP/s",
    }
    return "\n".join(f"{name:<30}{value:>12}" for name, value in rows.items())


QUESTIONS = {
    "tokens_per_second": Question(
        "estimate",
        "A model has {billions} billion weights of {bits} bits, {layers} layers, and {kv_heads} KV "
        "heads of {head_dim} numbers each; keys and values have 16 bits per number. A server "
        "decodes {batch} sequences together, each with a context of {context} tokens, on a card "
        "that reads {bandwidth} GB/s (GB = 10^9 bytes). Nothing but reading takes time, and each "
        "step reads all weights once. How many tokens per second do all sequences get together?",
        "model, bits, batch, context, bandwidth",
        _server,
        _throughput,
        "A step reads {billions} x {bits} / 8 GB of weights once, and 2 x {layers} x {kv_heads} x "
        "{head_dim} x 2 bytes for each of {batch} x {context} tokens; it takes these bytes / "
        "{bandwidth} GB/s and gives {batch} tokens.",
        within=1.03,
        points=8,
        minutes=8,
    ),
    "tokens_at_the_ridge": Question(
        "reading",
        "The figure shows the roofline of a card. A pass multiplies each weight, which has {bits} "
        "bits, with some tokens; leave out everything else that it reads and computes. From how "
        "many tokens on is the pass compute-bound?",
        "ridge and peak of the card, bits of a weight",
        _card,
        _tokens_at_ridge,
        "The ridge is at {ridge} FLOP per byte, and m tokens give 2 x m FLOPs for the {bits} / 8 "
        "bytes of each weight, so it is reached at m = {ridge} x {bits} / 16.",
        within=1.12,
        figure=_roofline,
    ),
    "best_change": Question(
        "diagnosis",
        "A decode step was measured. By the chapter's model, a step takes max(bytes / bandwidth, "
        "FLOP / peak) + overhead. Which one of these changes shortens the step most, if all else "
        "stays: `weights of half the bits`, `keys and values of half the bits`, `twice the "
        "flop/s`, or `half the overhead`?",
        "batch, bytes, arithmetic, overhead, card",
        _slow_step,
        _best_change,
        "Reading takes ({weights} + {kv}) GB / {bandwidth} GB/s, the arithmetic {tflop} TFLOP / "
        "{peak} TFLOP/s; only the longer of the two counts, and what is missing from the measured "
        "time is the overhead of {overhead} ms.",
        choices=CHANGES,
        figure=_profile,
        points=8,
        minutes=8,
    ),
}
WRITTEN = {
    "what_is_kept": Written(
        "A KV cache keeps the keys and values of earlier tokens, and nothing else of them. Why may "
        "they be kept, although the text grows? Why are they enough, and what does the cache cost "
        "in memory and in time?",
        "The causal mask lets a token look only at itself and at earlier tokens, so a later token "
        "changes nothing in the earlier ones, in any layer: their keys and values stay valid. A "
        "new token compares its own query with all keys and mixes all values; the earlier tokens' "
        "queries, residual streams and logits are not read again. In return, the cache takes "
        "memory in every layer for every token of the context, and each decode step must read all "
        "of it.",
        {
            "causal mask: later tokens change nothing in earlier ones": 4,
            "a new token's query needs only the keys and values of the others": 3,
            "memory for each layer and each token of the context": 2,
            "each decode step reads the whole cache": 1,
        },
    ),
    "limits_of_a_batch": Written(
        "Someone says: decode is memory-bound, but a large enough batch always makes it "
        "compute-bound. Say what is right about this, what is wrong, and on what it depends.",
        "The weights are read once per step, whatever the batch is, so each further sequence adds "
        "arithmetic without reading more weights: with short contexts a large batch can reach the "
        "ridge. But each sequence also has keys and values of its own, which are read for its one "
        "token only, and they grow with the context. From some context on, a sequence adds more "
        "time of reading than of arithmetic, and the step is memory-bound at every batch. The "
        "card's memory may also be full before.",
        {
            "the weights are read once for the whole batch": 3,
            "each sequence reads keys and values of its own": 3,
            "with long contexts, no batch is compute-bound": 3,
            "the memory of the card limits the batch, too": 1,
        },
    ),
}
