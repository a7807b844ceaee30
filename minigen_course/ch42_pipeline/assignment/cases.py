"""Cases of chapter 42's exercises, drawn by a seed."""

from random import Random
from typing import Any

import torch
from torch import Tensor

from minigen_course.ch42_pipeline.lesson.timeline import pass_once
from minigen_course.ch42_pipeline.reference import Devices, Model
from minigen_course.grading.varied import Varied, normal, outcome


def _bubble(random: Random) -> dict[str, Any]:
    num_stages = random.randint(2, 4)
    seconds = [random.choice((0.5, 1.0, 1.5, 2.0)) for _ in range(num_stages)]
    spans = pass_once(seconds, random.randint(1, 3)).computing()
    random.shuffle(spans)
    return {"spans": spans, "num_stages": num_stages + random.choice((0, 0, 1))}


def _deal_layers(random: Random) -> dict[str, Any]:
    work = [float(random.randint(1, 9)) for _ in range(random.randint(4, 9))]
    return {"work": work, "num_stages": random.choice((2, 2, 3, 3, 4, len(work) + 1))}


def _dealt(part: Any, work: list[float], num_stages: int) -> Any:
    """Deal the layers out, and return the layers of all stages and the work of the slowest one.

    If the part raises an error, it is the name of the error.
    """
    stages = outcome(lambda: part(list(work), num_stages))
    if isinstance(stages, str):
        return stages
    layers = [layer for each in stages for layer in each]
    sums = [sum(work[layer] for layer in each) for each in stages]
    return len(stages), layers, max(sums), min(map(len, stages)) > 0


def _micro_batches(random: Random) -> dict[str, Any]:
    sizes = (1, 1, 1, 4, 8, 16, 32)
    num_tokens = [random.choice(sizes) for _ in range(random.randint(3, 9))]
    return {"num_tokens": num_tokens, "num_batches": random.randint(2, 4)}


def _zig_zag(random: Random) -> dict[str, Any]:
    num_ranks = random.randint(2, 4)
    return {
        "num_tokens": random.randint(3, 24),
        "rank": random.randrange(num_ranks),
        "num_ranks": num_ranks,
    }


def _merge_parts(random: Random) -> dict[str, Any]:
    tokens, heads, width = random.randint(1, 3), random.randint(1, 2), random.randint(2, 4)
    found = {}
    for name in ("", "other_"):
        found[f"{name}out"] = normal(random, tokens, heads, width)
        found[f"{name}lse"] = normal(random, tokens, heads) * random.choice((1.0, 80.0))
        if random.random() < 0.4:
            found[f"{name}lse"][random.randrange(tokens)] = -torch.inf
    return found


def _merged(part: Any, **tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the two parts, and return the output and its log-sum-exp."""
    out, lse = part(*(each.clone() for each in tensors.values()))
    return out, lse


def _choose_cut(random: Random) -> dict[str, Any]:
    number = random.choice((2, 4, 8))
    latency = random.choice((10, 50, 400, 3000))
    return {
        "model": [random.choice((4, 30, 80)), random.choice((2, 3, 8)), random.randint(5, 150)],
        "cache_mb": random.randint(50, 2000),
        "num_devices": number,
        "memory_gb": random.choice((24, 80, 200)),
        "all_reduce_us": {t: latency * (t - 1) for t in (1, 2, 4, 8) if t <= number},
        "transfer_us": random.choice((5, 40, 900)),
        "num_sequences": random.choice((1, 2, 16, 40)),
    }


def _cut(
    part: Any,
    model: list[int],
    cache_mb: int,
    num_devices: int,
    memory_gb: int,
    all_reduce_us: dict[int, int],
    transfer_us: int,
    num_sequences: int,
) -> Any:
    """Choose the cut of a model, given as its layers, KV heads and GB of weights.

    The devices read 2,000 GB per second.
    """
    layers, kv_heads, weights = model
    sums = {t: each * 1e-6 for t, each in all_reduce_us.items()}
    devices = Devices(num_devices, memory_gb * 1e9, 2e12, sums, transfer_us * 1e-6)
    found = part(Model(layers, kv_heads, weights * 1e9, cache_mb * 1e6), devices, num_sequences)
    return found if found is None else tuple(found)


VARIED = {
    "bubble": Varied("the spans, and the number of stages", _bubble),
    "deal_layers": Varied(
        "the layers' work, sometimes too few for the stages", _deal_layers, _dealt
    ),
    "micro_batches": Varied("the tokens of each sequence", _micro_batches),
    "zig_zag": Varied("the tokens, the rank and the ranks", _zig_zag),
    "merge_parts": Varied("both parts, sometimes with an empty token", _merge_parts, _merged),
    "choose_cut": Varied("the model, the devices and the load", _choose_cut, _cut),
}
