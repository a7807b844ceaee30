"""Cases of chapter 17's exercises, drawn by a seed."""

from random import Random
from typing import Any

import torch

from minigen.sampling.params import SamplingParams
from minigen.sequence import Sequence
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
