"""Answers to the exercises of chapter 42."""

import heapq
import math
from collections.abc import Callable, Sequence
from itertools import accumulate, combinations, pairwise
from typing import Any

import torch
from torch import Tensor

from minigen_course.ch42_pipeline.reference import Devices, Model
from tests.answers import Answers


def bubble_by_stage(spans: Any, num_stages: int) -> float:
    """Right: the mean of the stages' idle fractions."""
    if not spans:
        return 0
    first, last = min(each[1] for each in spans), max(each[2] for each in spans)
    idle = [
        1 - sum(end - start for owner, start, end in spans if owner == stage) / (last - first)
        for stage in range(num_stages)
    ]
    return sum(idle) / num_stages


def bubble_by_gaps(spans: Any, num_stages: int) -> float:
    """Right: adds up the gaps of each stage."""
    if len(spans) == 0:
        return 0.0
    first, last = min(each[1] for each in spans), max(each[2] for each in spans)
    gaps = 0.0
    for stage in range(num_stages):
        at = first
        for _, start, end in sorted(each for each in spans if each[0] == stage):
            gaps += start - at
            at = end
        gaps += last - at
    return gaps / (last - first) / num_stages


def wrong_bubble(name: str) -> Callable[[Any, int], Any]:
    def part(spans: Any, num_stages: int) -> Any:
        if not spans:
            if name == "None without spans":
                return None
            if name == "idle without spans":
                return 1.0
            return 0.0
        first, last = min(each[1] for each in spans), max(each[2] for each in spans)
        if name == "from 0":
            first = 0.0
        if name == "the last span in the list ends":
            last = spans[-1][2]
        if name == "the first span in the list begins":
            first = spans[0][1]
        busy = sum(end - start for _, start, end in spans)
        used = {stage for stage, _, _ in spans}
        if name == "only stages with spans":
            num_stages = len(used)
        if name == "one stage":
            num_stages = 1
        if name == "between a stage's own first and last":
            whole = 0.0
            for stage in used:
                own = [each for each in spans if each[0] == stage]
                whole += max(each[2] for each in own) - min(each[1] for each in own)
            return 1 - busy / whole
        whole = num_stages * (last - first)
        if name == "relative to the ideal time":
            return (whole - busy) / busy
        if name == "busy":
            return busy / whole
        if name == "per cent":
            return 100 * (1 - busy / whole)
        if name == "by the formula":
            batches = len(spans) // num_stages
            return (num_stages - 1) / max(batches + num_stages - 1, 1)
        if name == "sorts what it is given":
            spans.sort()
        if name == "rounded":
            return round(1 - busy / whole, 2)
        return 1 - busy / whole

    return part


WRONG_BUBBLES = [
    *("None without spans", "idle without spans", "from 0", "the last span in the list ends"),
    *("the first span in the list begins", "only stages with spans", "one stage"),
    *("between a stage's own first and last", "relative to the ideal time", "busy", "per cent"),
    *("by the formula", "sorts what it is given", "rounded"),
]


def dealt_by_limit(work: Any, num_stages: int) -> list[range]:
    """Right: tries limits, from the smallest possible work of the slowest stage on."""
    if num_stages > len(work) or num_stages < 1:
        raise ValueError("Each stage needs a layer.")
    sums = {sum(work[i:j]) for i in range(len(work)) for j in range(i + 1, len(work) + 1)}
    for limit in sorted(sums):
        stages, begin = [], 0
        for stage in range(num_stages):
            end, must_stay = begin + 1, num_stages - stage - 1
            while end < len(work) - must_stay and sum(work[begin : end + 1]) <= limit + 1e-9:
                end += 1
            stages.append(range(begin, end))
            begin = end
        most = max(sum(work[each] for each in stage) for stage in stages)
        if begin == len(work) and most <= limit + 1e-9:
            return stages
    raise AssertionError("the sum of all is enough")


def dealt_by_trying(work: Any, num_stages: int) -> list[range]:
    """Right: tries all ways; slow for many layers."""
    if num_stages > len(work) or num_stages < 1:
        raise ValueError(f"{num_stages} stages are too many.")
    if len(work) > 14:
        return dealt_by_limit(work, num_stages)
    ways = [[0, *way, len(work)] for way in combinations(range(1, len(work)), num_stages - 1)]
    best = min(ways, key=lambda way: max(sum(work[i:j]) for i, j in pairwise(way)))
    return [range(i, j) for i, j in pairwise(best)]


def _by_counts(counts: Sequence[int]) -> list[range]:
    return [range(i, j) for i, j in pairwise([0, *accumulate(counts)])]


def wrong_deal(name: str) -> Callable[[Any, int], Any]:
    def part(work: Any, num_stages: int) -> Any:
        size = len(work)
        if num_stages > size or num_stages < 1:
            if name == "empty stages for too many":
                return _by_counts([1] * size + [0] * (num_stages - size))
            if name == "None for too many":
                return None
            if name == "an assertion for too many":
                raise AssertionError("too many stages")
            if name == "an error without a sentence":
                raise ValueError
            raise ValueError("Each stage needs a layer.")
        if name == "by counts, the rest to the last":
            each = size // num_stages
            return _by_counts([each] * (num_stages - 1) + [size - each * (num_stages - 1)])
        if name == "by counts, the rest to the first ones":
            each, more = divmod(size, num_stages)
            return _by_counts([each + (stage < more) for stage in range(num_stages)])
        if name == "rounded up, so that the last may be empty":
            each = -(-size // num_stages)
            return [
                range(min(i * each, size), min((i + 1) * each, size)) for i in range(num_stages)
            ]
        if name in ("up to the mean", "past the mean"):
            stages, begin, mean = [], 0, sum(work) / num_stages
            for stage in range(num_stages - 1):
                end = begin + 1
                while end < size - (num_stages - stage - 1) and (
                    sum(work[begin : end + 1]) <= mean
                    if name == "up to the mean"
                    else sum(work[begin:end]) < mean
                ):
                    end += 1
                stages.append(range(begin, end))
                begin = end
            return [*stages, range(begin, size)]
        found = dealt_by_trying(work, num_stages)
        if name == "lists of layers":
            return [list(each) for each in found]
        if name == "counts":
            return [len(each) for each in found]
        if name == "backwards":
            return found[::-1]
        if name == "without the last layer":
            return [*found[:-1], range(found[-1].start, found[-1].stop - 1)]
        if name == "both ends included":
            return [range(each.start, each.stop + 1) for each in found]
        if name == "changes the work":
            work.append(0.0)
        return found

    return part


WRONG_DEALS = [
    *("empty stages for too many", "None for too many", "an assertion for too many"),
    *("an error without a sentence", "by counts, the rest to the last", "up to the mean"),
    *("by counts, the rest to the first ones", "rounded up, so that the last may be empty"),
    *("past the mean", "lists of layers", "counts", "backwards", "without the last layer"),
    *("both ends included", "changes the work"),
]


def batches_by_heap(num_tokens: Any, num_batches: int) -> list[list[int]]:
    """Right: a heap of totals."""
    heap = [(0, number, []) for number in range(num_batches)]  # type: ignore[var-annotated]
    for tokens, sequence in sorted((-each, number) for number, each in enumerate(num_tokens)):
        total, number, batch = heapq.heappop(heap)
        batch.append(sequence)
        heapq.heappush(heap, (total - tokens, number, batch))
    return [sorted(batch) for _, _, batch in sorted(heap, key=lambda each: each[1]) if batch]


def batches_by_loop(num_tokens: Any, num_batches: int) -> list[list[int]]:
    """Right: looks for the longest sequence in each round."""
    left = dict(enumerate(num_tokens))
    batches: dict[int, list[int]] = {number: [] for number in range(num_batches)}
    while left:
        longest = max(left, key=lambda each: (left[each], -each))
        least = min(batches, key=lambda each: sum(num_tokens[one] for one in batches[each]))
        batches[least].append(longest)
        batches[least].sort()
        del left[longest]
    return [batch for batch in batches.values() if batch]


def wrong_batches(name: str) -> Callable[[Any, int], Any]:
    def part(num_tokens: Any, num_batches: int) -> Any:
        order = sorted(range(len(num_tokens)), key=lambda each: -num_tokens[each])
        if name == "in the order of arrival":
            order = list(range(len(num_tokens)))
        if name == "the shortest first":
            order = sorted(range(len(num_tokens)), key=lambda each: num_tokens[each])
        if name == "the higher number first":
            order = sorted(order, key=lambda each: (num_tokens[each], each))[::-1]
        batches: list[list[int]] = [[] for _ in range(num_batches)]
        totals = [0] * num_batches
        for place, sequence in enumerate(order):
            batch = totals.index(min(totals))
            if name == "in turn":
                batch = place % num_batches
            if name == "the last of equal ones":
                batch = num_batches - 1 - totals[::-1].index(min(totals))
            if name == "the fullest":
                batch = totals.index(max(totals))
            batches[batch].append(sequence)
            totals[batch] += 1 if name == "counts sequences" else num_tokens[sequence]
        if name == "neighbours together":
            size = max(1, -(-len(order) // num_batches))
            batches = [
                list(range(i, min(i + size, len(order)))) for i in range(0, len(order), size)
            ]
        if name == "empty ones stay":
            return [sorted(each) for each in batches]
        if name == "in the order of giving":
            return [each for each in batches if each]
        if name == "tokens, not numbers":
            return [[num_tokens[one] for one in sorted(each)] for each in batches if each]
        if name == "sorted by their first sequence":
            return sorted(sorted(each) for each in batches if each)
        if name == "one is lost":
            return [sorted(each)[: len(num_tokens) - 1] for each in batches if each]
        if name == "tuples":
            return [tuple(sorted(each)) for each in batches if each]
        if name == "changes what it is given":
            num_tokens.sort()
        return [sorted(each) for each in batches if each]

    return part


WRONG_BATCHES = [
    *("in the order of arrival", "the shortest first", "the higher number first", "in turn"),
    *("the last of equal ones", "the fullest", "counts sequences", "neighbours together"),
    *("empty ones stay", "in the order of giving", "tokens, not numbers"),
    *("sorted by their first sequence", "one is lost", "tuples", "changes what it is given"),
]


def zig_zag_by_sizes(num_tokens: int, rank: int, num_ranks: int) -> list[int]:
    """Right: by a list of chunks."""
    count = 2 * num_ranks
    sizes = [num_tokens // count + (chunk < num_tokens % count) for chunk in range(count)]
    ends = [0, *accumulate(sizes)]
    chunks = [list(range(i, j)) for i, j in pairwise(ends)]
    return chunks[rank] + chunks[-1 - rank]


def zig_zag_by_owner(num_tokens: int, rank: int, num_ranks: int) -> list[int]:
    """Right: deals the chunks out forwards and backwards, and looks up each position's owner."""
    owners = [*range(num_ranks), *reversed(range(num_ranks))]
    chunks = torch.arange(num_tokens).tensor_split(2 * num_ranks)
    found: list[int] = []
    for owner, chunk in zip(owners, chunks, strict=True):
        found += chunk.tolist() if owner == rank else []
    return found


def wrong_zig_zag(name: str) -> Callable[[int, int, int], Any]:
    def part(num_tokens: int, rank: int, num_ranks: int) -> Any:
        count = 2 * num_ranks
        size, more = divmod(num_tokens, count)
        pair = (rank, count - 1 - rank)
        if name == "one piece for each rank":
            size, more = divmod(num_tokens, num_ranks)
            pair = (rank,)  # type: ignore[assignment]
        if name == "the chunk n behind":
            pair = (rank, rank + num_ranks)
        if name == "neighbouring chunks":
            pair = (2 * rank, 2 * rank + 1)
        if name == "one chunk further":
            pair = (rank, (count - rank) % count)
        if name == "the far chunk first":
            pair = pair[::-1]
        if name == "striped":
            return list(range(rank, num_tokens, num_ranks))
        found: list[int] = []
        for chunk in pair:
            begin = chunk * size + min(chunk, more)
            end = begin + size + (chunk < more)
            if name == "the rest is lost":
                begin, end = chunk * size, (chunk + 1) * size
            if name == "the rest goes to the last chunk":
                begin = chunk * size
                end = num_tokens if chunk == count - 1 else begin + size
            if name == "rounded up":
                wide = -(-num_tokens // count)
                begin, end = min(chunk * wide, num_tokens), min((chunk + 1) * wide, num_tokens)
            if name == "the last chunks have one more":
                late = max(chunk - (count - more), 0)
                begin = chunk * size + late
                end = begin + size + (chunk >= count - more)
            if name == "beginnings forget the longer ones":
                begin = chunk * size
                end = begin + size + (chunk < more)
            found += range(begin, end)
        if name == "ranges":
            return range(found[0], found[-1] + 1) if found else range(0)
        if name == "a tuple":
            return tuple(found)
        return found

    return part


WRONG_ZIG_ZAGS = [
    *("one piece for each rank", "the chunk n behind", "neighbouring chunks"),
    *("one chunk further", "the far chunk first", "striped", "the rest is lost"),
    *("the rest goes to the last chunk", "rounded up", "the last chunks have one more"),
    *("beginnings forget the longer ones", "ranges", "a tuple"),
]


def merged_by_maximum(
    out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Right: by a maximum, as in online softmax."""
    most = torch.maximum(lse, other_lse).clamp_min(-1e30)
    mine, its = torch.exp(lse - most), torch.exp(other_lse - most)
    total = mine + its
    safe = torch.where(total > 0, total, torch.ones_like(total))
    mixed = (mine[..., None] * out + its[..., None] * other_out) / safe[..., None]
    return mixed, most + total.log()


def merged_by_stacking(
    out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Right: softmax over the parts."""
    both = torch.stack([lse, other_lse])
    weights = both.softmax(0).nan_to_num(0.0)
    outs = torch.stack([out, other_out])
    return (weights.unsqueeze(-1) * outs).sum(0), both.logsumexp(0)


def wrong_merge(name: str) -> Callable[[Tensor, Tensor, Tensor, Tensor], Any]:
    def part(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> Any:
        if name == "exponentials without a shift":
            mine, its = lse.exp(), other_lse.exp()
            total = mine + its
            mixed = (mine[..., None] * out + its[..., None] * other_out) / total[..., None]
            return mixed, total.log()
        if name == "the mean of both":
            return (out + other_out) / 2, torch.logaddexp(lse, other_lse)
        if name == "the sum of both":
            return out + other_out, torch.logaddexp(lse, other_lse)
        if name == "weighted by lse":
            total = lse + other_lse
            mixed = lse[..., None] * out + other_lse[..., None] * other_out
            return mixed / total[..., None], torch.logaddexp(lse, other_lse)
        if name == "the larger part wins":
            mixed = torch.where((lse >= other_lse)[..., None], out, other_out)
            return mixed, torch.maximum(lse, other_lse)
        merged = torch.logaddexp(lse, other_lse)
        if name == "nan where nothing is seen":
            shift = merged
        else:
            shift = merged.masked_fill(merged == -torch.inf, 0.0)
        mine, its = (lse - shift).exp(), (other_lse - shift).exp()
        if name == "the weights exchanged":
            mine, its = its, mine
        mixed = mine.unsqueeze(-1) * out + its.unsqueeze(-1) * other_out
        if name == "the lse of the larger":
            return mixed, torch.maximum(lse, other_lse)
        if name == "lse added":
            return mixed, lse + other_lse
        if name == "lse by base 2":
            return mixed, merged / math.log(2)
        if name == "0 for an empty lse":
            return mixed, merged.masked_fill(merged == -torch.inf, 0.0)
        if name == "the output alone":
            return mixed
        if name == "changes the first output":
            out *= mine.unsqueeze(-1)
            out += its.unsqueeze(-1) * other_out
            return out, merged
        if name == "one weight for all heads":
            weight = mine.mean(-1)[:, None, None]
            return weight * out + (1 - weight) * other_out, merged
        if name == "the first output where nothing is seen":
            return torch.where((merged == -torch.inf)[..., None], out, mixed), merged
        return mixed, merged

    return part


WRONG_MERGES = [
    *("exponentials without a shift", "the mean of both", "the sum of both", "weighted by lse"),
    *("the larger part wins", "nan where nothing is seen", "the weights exchanged"),
    *("the lse of the larger", "lse added", "lse by base 2", "0 for an empty lse"),
    *("the output alone", "changes the first output", "one weight for all heads"),
    *("the first output where nothing is seen",),
]


def cut_by_loops(model: Model, devices: Devices, num_sequences: int) -> Any:
    """Right: all triples, and a dict of times."""
    times = {}
    sizes = range(1, devices.num_devices + 1)
    for t in devices.all_reduce:
        for p in sizes:
            for d in sizes:
                b = math.ceil(num_sequences / d)
                share = (model.weight_bytes + b * model.cache_bytes) / (t * p)
                if (
                    t * p * d == devices.num_devices
                    and model.kv_heads % t == 0
                    and p <= model.layers
                    and d <= num_sequences
                    and share <= devices.memory
                ):
                    batch = b / min(p, b)
                    read = (model.weight_bytes + batch * model.cache_bytes) / (t * p)
                    a_stage = (
                        read / devices.bandwidth + 2 * model.layers / p * devices.all_reduce[t]
                    )
                    times[t, p, d] = p * (a_stage + (devices.transfer if p > 1 else 0))
    return min(times, key=lambda cut: (times[cut], cut)) if times else None


def wrong_cut(name: str) -> Callable[[Model, Devices, int], Any]:
    def part(model: Model, devices: Devices, num_sequences: int) -> Any:
        found = []
        number = devices.num_devices
        for t in range(1, number + 1):
            for p in range(1, number // t + 1):
                d, left = divmod(number, t * p)
                if left and name != "some devices stay idle":
                    continue
                if t not in devices.all_reduce:
                    continue
                if model.kv_heads % t and name != "heads are forgotten":
                    continue
                if p > model.layers and name != "more stages than layers":
                    continue
                if d > num_sequences and name != "more replicas than sequences":
                    continue
                if d > 1 and name == "no replicas":
                    continue
                if p > 1 and name == "no stages":
                    continue
                b = -(-num_sequences // d)
                if name == "rounded down":
                    b = max(num_sequences // d, 1)
                if name == "all sequences in each replica":
                    b = num_sequences
                held = (model.weight_bytes + b * model.cache_bytes) / (t * p)
                if name == "weights alone must fit":
                    held = model.weight_bytes / (t * p)
                if name == "the whole model must fit":
                    held = model.weight_bytes + b * model.cache_bytes
                if held > devices.memory and name != "the memory is forgotten":
                    continue
                m = p if name == "p micro-batches, even of one sequence" else min(p, b)
                if name == "one micro-batch":
                    m = 1
                read = model.weight_bytes + b / m * model.cache_bytes
                if name == "no cache is read":
                    read = model.weight_bytes
                stage = read / (t * p * devices.bandwidth)
                sums = 2 * model.layers / p * devices.all_reduce[t]
                if name == "all layers' messages on each stage":
                    sums *= p
                if name == "one all-reduce per layer":
                    sums /= 2
                if name != "messages are free":
                    stage += sums
                hops = p if p > 1 else 0
                if name == "p - 1 transfers":
                    hops = p - 1
                if name == "transfers are free":
                    hops = 0
                step = p * stage + hops * devices.transfer
                if name == "a stage's time, not a step's":
                    step = stage + devices.transfer * (p > 1)
                found.append((step, (t, p, d)))
        if not found:
            return (1, 1, number) if name == "replicas if nothing fits" else None
        if name == "the slowest":
            return max(found)[1]
        if name == "the larger t of equal ones":
            return min(found, key=lambda each: (each[0], -each[1][0]))[1]
        if name == "the seconds":
            return min(found)[0]
        return min(found)[1]

    return part


WRONG_CUTS = [
    *("some devices stay idle", "heads are forgotten", "more stages than layers"),
    *("more replicas than sequences", "no replicas", "no stages", "rounded down"),
    *("all sequences in each replica", "weights alone must fit", "the whole model must fit"),
    *("the memory is forgotten", "p micro-batches, even of one sequence", "one micro-batch"),
    *("no cache is read", "all layers' messages on each stage", "one all-reduce per layer"),
    *("messages are free", "p - 1 transfers", "transfers are free"),
    *("a stage's time, not a step's", "replicas if nothing fits", "the slowest"),
    *("the larger t of equal ones", "the seconds"),
]

ANSWERS = {
    "bubble": Answers(
        right=(bubble_by_stage, bubble_by_gaps, wrong_bubble("nothing")),
        wrong={name: wrong_bubble(name) for name in WRONG_BUBBLES},
        equivalent={},
    ),
    "deal_layers": Answers(
        right=(dealt_by_limit, dealt_by_trying, wrong_deal("nothing")),
        wrong={name: wrong_deal(name) for name in WRONG_DEALS},
        equivalent={
            "begin < end -> begin <= end": "an empty stage is no gain, and earlier begins win",
        },
    ),
    "micro_batches": Answers(
        right=(batches_by_heap, batches_by_loop, wrong_batches("nothing")),
        wrong={name: wrong_batches(name) for name in WRONG_BATCHES},
        equivalent={
            "0 -> 1": "all totals begin with the same number",
        },
    ),
    "zig_zag": Answers(
        right=(zig_zag_by_sizes, zig_zag_by_owner, wrong_zig_zag("nothing")),
        wrong={name: wrong_zig_zag(name) for name in WRONG_ZIG_ZAGS},
        equivalent={},
    ),
    "merge_parts": Answers(
        right=(merged_by_maximum, merged_by_stacking, wrong_merge("nothing")),
        wrong={name: wrong_merge(name) for name in WRONG_MERGES},
        equivalent={
            "0.0 -> 1.0": "-inf less any number is -inf",
        },
    ),
    "choose_cut": Answers(
        right=(cut_by_loops, wrong_cut("nothing")),
        wrong={name: wrong_cut(name) for name in WRONG_CUTS},
        equivalent={
            "1 -> 2 #2": "one more than all devices is no key of the messages",
            "1 -> 2 #5": "one stage more than devices leaves some over",
            "devices.num_devices // t -> devices.num_devices * t": "too many stages leave a rest",
        },
    ),
}
