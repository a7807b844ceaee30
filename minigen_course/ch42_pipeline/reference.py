"""The rules of cutting a model and its work, each as a small function: the solutions of chapter 42.

Sources: Huang et al. 2019 (GPipe: micro-batches and the bubble); Narayanan et al. 2021 (stages that
are dealt out, and cuts that are combined); Graham 1969 (the longest job first); Liu et al. 2023
(Ring Attention) and Dubey et al. 2024 (Llama 3: two chunks for each rank); Dao et al. 2022 and
Milakov and Gimelshein 2018 (partial softmaxes and their merge).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from jaxtyping import Float
from torch import Tensor


def bubble(spans: Sequence[tuple[int, float, float]], num_stages: int) -> float:
    """Return the fraction of the stages' time in which they are idle, from 0 to 1.

    A span (stage, start, end) says when a stage computes, in seconds; spans of one stage do not
    overlap, and come in any order. The time counts from the first start to the last end of all
    spans, for each of the stages, also for one without a span. Without spans the fraction is 0.
    """
    if not spans:
        return 0.0
    busy = sum(end - start for _, start, end in spans)
    whole = max(end for _, _, end in spans) - min(start for _, start, _ in spans)
    return 1 - busy / (num_stages * whole)


def deal_layers(work: Sequence[float], num_stages: int) -> list[range]:
    """Return the layers of each stage, as ranges that follow one another.

    `work[i]` is the time of layer i, above 0. Each stage has at least one layer, and the stage with
    the most work has as little as possible. Raises `ValueError` if there are more stages than
    layers.
    """
    if not 1 <= num_stages <= len(work):
        raise ValueError(f"{len(work)} layers cannot be dealt to {num_stages} stages.")
    # The best way to give the first `end` layers to the stages so far: its slowest stage, and
    # where each stage begins.
    best = {end: (total, [0]) for end, total in enumerate(accumulate(work), 1)}
    for _ in range(num_stages - 1):
        best = {
            end: min(
                (max(best[begin][0], sum(work[begin:end])), [*best[begin][1], begin])
                for begin in best
                if begin < end
            )
            for end in list(best)[1:]
        }
    _, begins = best[len(work)]
    return [range(*each) for each in pairwise([*begins, len(work)])]


def micro_batches(num_tokens: Sequence[int], num_batches: int) -> list[list[int]]:
    """Return which sequences each micro-batch of a step has, as sorted lists of their numbers.

    `num_tokens[i]` is how many tokens sequence i computes in the step; a sequence is not divided.
    The longest sequence goes first (of equal ones, the one with the lower number), and each goes to
    the micro-batch that has the fewest tokens so far (of equal ones, the first). Micro-batches
    without a sequence are left out.
    """
    batches: list[list[int]] = [[] for _ in range(num_batches)]
    totals = [0] * num_batches
    for sequence in sorted(range(len(num_tokens)), key=lambda each: -num_tokens[each]):
        batch = totals.index(min(totals))
        batches[batch].append(sequence)
        totals[batch] += num_tokens[sequence]
    return [sorted(each) for each in batches if each]


def zig_zag(num_tokens: int, rank: int, num_ranks: int) -> list[int]:
    """Return the positions of a prompt that a rank gets, in ascending order.

    The prompt is cut into 2 n chunks for n ranks, and rank i gets chunk i and chunk 2 n - 1 - i. If
    the tokens do not divide, the first chunks have one token more than the others.
    """
    size, more = divmod(num_tokens, 2 * num_ranks)
    found: list[int] = []
    for chunk in (rank, 2 * num_ranks - 1 - rank):
        begin = chunk * size + min(chunk, more)
        found += range(begin, begin + size + (chunk < more))
    return found


def merge_parts(
    out: Float[Tensor, "tokens heads head_dim"],
    lse: Float[Tensor, "tokens heads"],
    other_out: Float[Tensor, "tokens heads head_dim"],
    other_lse: Float[Tensor, "tokens heads"],
) -> tuple[Float[Tensor, "tokens heads head_dim"], Float[Tensor, "tokens heads"]]:
    """Return the attention over two sets of keys, from the attention over each of them.

    `out` is the weighted mean of a set's values, and `lse` the log of the sum of exp(score) over
    its keys. A token that sees no key of a set has an `lse` of -inf there, and any finite `out`. If
    it sees no key of either, its result is 0 with an `lse` of -inf.
    """
    merged = torch.logaddexp(lse, other_lse)
    shift = merged.masked_fill(merged == -torch.inf, 0.0)  # -inf less -inf would be nan
    mine, its = (lse - shift).exp(), (other_lse - shift).exp()
    return mine.unsqueeze(-1) * out + its.unsqueeze(-1) * other_out, merged


@dataclass(frozen=True)
class Model:
    """What a cut must know of a model: sizes in bytes, the cache for one sequence."""

    layers: int
    kv_heads: int
    weight_bytes: float
    cache_bytes: float


@dataclass(frozen=True)
class Devices:
    """What a cut must know of the devices: memory in bytes, bandwidth in bytes per second.

    `all_reduce[t]` are the seconds of one all-reduce over t devices, for each t that is possible.
    `transfer` are the seconds of one message to the next stage.
    """

    num_devices: int
    memory: float
    bandwidth: float
    all_reduce: Mapping[int, float]
    transfer: float


def choose_cut(model: Model, devices: Devices, num_sequences: int) -> tuple[int, int, int] | None:
    """Return the fastest cut of a decode step: ranks of a tensor split, stages, and replicas.

    t ranks, p stages and d replicas use all devices: t p d = `num_devices`. t divides the KV heads
    and is in `all_reduce`; p is at most the number of layers; d is at most the number of sequences.
    A replica has b sequences, d-th of all, rounded up, and must hold (weights + b caches) / (t p)
    on each device. It runs them as m micro-batches, the smaller of p and b, so a stage takes

        (weights + b / m caches) / (t p bandwidth) + 2 layers / p all_reduce[t]

    for one of them, and a step takes p times that, and p transfers if p is more than 1. Of equally
    fast cuts, the one with the smaller t, then the smaller p. None if no cut fits into the memory.
    """
    found = []
    for t in range(1, devices.num_devices + 1):
        for p in range(1, devices.num_devices // t + 1):
            d, left = divmod(devices.num_devices, t * p)
            if left or model.kv_heads % t or t not in devices.all_reduce:
                continue
            if p > model.layers or d > num_sequences:
                continue
            b = -(-num_sequences // d)
            if (model.weight_bytes + b * model.cache_bytes) / (t * p) > devices.memory:
                continue
            read = model.weight_bytes + b / min(p, b) * model.cache_bytes
            stage = read / (t * p * devices.bandwidth)
            stage += 2 * model.layers / p * devices.all_reduce[t]
            found.append((p * stage + p * devices.transfer * (p > 1), (t, p, d)))
    return min(found)[1] if found else None
