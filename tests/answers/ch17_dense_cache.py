"""Answers to the exercises of chapter 17."""

from typing import Any

import torch

from minigen_course.ch17_dense_cache.reference import DenseCache, attend_dense
from tests.answers import Answers


class GrowingCache:
    """Right, and grown by concatenation."""

    def __init__(
        self, layers: int, max_tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ):
        empty = torch.empty(2, 0, kv_heads, head_dim, dtype=dtype)
        self.kept, self.num_tokens = [empty] * layers, 0

    def store(self, layer_id: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        old = self.kept[layer_id][:, : self.num_tokens]
        self.kept[layer_id] = torch.cat([old, torch.stack([k, v]).to(old.dtype)], dim=1)
        return self.kept[layer_id]

    def advance(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens


class ListedCache:
    """Right, with keys and values apart."""

    def __init__(
        self, layers: int, max_tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ):
        shape = (max_tokens, kv_heads, head_dim)
        self.layers = [[torch.zeros(shape, dtype=dtype) for _ in "kv"] for _ in range(layers)]
        self.num_tokens = 0

    def store(self, layer_id: int, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        end = self.num_tokens + k.shape[0]
        for kept, new in zip(self.layers[layer_id], (k, v), strict=True):
            kept[self.num_tokens : end].copy_(new)
        return [kept[:end] for kept in self.layers[layer_id]]

    def advance(self, num_tokens: int) -> None:
        self.num_tokens = self.num_tokens + num_tokens


SHARED = torch.zeros(2, 4, 64, 3, 4)


def wrong_cache(name: str) -> type:
    class Cache:
        def __init__(self, layers: int, max_tokens: int, kv_heads: int, head_dim: int, dtype: Any):
            if name == "always float32":
                dtype = torch.float32
            self.kv = torch.zeros(2, layers, max_tokens, kv_heads, head_dim, dtype=dtype)
            if name == "one memory for all":
                self.kv = SHARED
            self.num_tokens = 1 if name == "begins at one" else 0
            self.views: list[Any] = []

        def store(self, layer_id: int, k: torch.Tensor, v: torch.Tensor) -> Any:
            if name == "one layer for all":
                layer_id = 0
            begin = 0 if name == "writes at the beginning" else self.num_tokens
            if name == "last token again" and begin:
                begin -= 1
            end = begin + len(k)
            if name == "keeps no copy":
                self.views[self.num_tokens :] = list(zip(k, v, strict=True))
                keys, values = zip(*self.views, strict=True)
                dtype = self.kv.dtype
                return torch.stack(keys).to(dtype), torch.stack(values).to(dtype)
            if name == "keys and values exchanged":
                k, v = v, k
            self.kv[0, layer_id, begin:end] = k
            if name != "values forgotten":
                self.kv[1, layer_id, begin:end] = v
            if name == "store counts":
                self.num_tokens = end
            if name == "returns only the new":
                return self.kv[:, layer_id, begin:end]
            if name == "returns all places":
                return self.kv[:, layer_id]
            if name == "returns what was there before":
                return self.kv[:, layer_id, :begin]
            if name == "returns None":
                return None
            if name == "heads first":
                return self.kv[:, layer_id, :end].transpose(1, 2)
            return self.kv[:, layer_id, :end]

        def advance(self, num_tokens: int) -> None:
            if name == "advance sets":
                self.num_tokens = num_tokens
            elif name == "advance by one":
                self.num_tokens += 1
            elif name not in ("store counts", "never advances"):
                self.num_tokens += num_tokens

    return Cache


WRONG_CACHES = [
    *("always float32", "one memory for all", "begins at one", "one layer for all"),
    *("writes at the beginning", "last token again", "keeps no copy"),
    *("keys and values exchanged", "values forgotten", "store counts", "returns only the new"),
    *("returns all places", "returns what was there before", "returns None", "heads first"),
    *("advance sets", "advance by one", "never advances"),
]


class KeptWindow:
    """Right, and keeps all tokens, of which it returns the last."""

    def __init__(self, layers: int, window: int, kv_heads: int, head_dim: int, dtype: Any):
        self.window, self.dtype, self.num_tokens = window, dtype, 0
        self.kept: list[list[Any]] = [[] for _ in range(layers)]

    def store(self, layer_id: int, k: torch.Tensor, v: torch.Tensor) -> Any:
        new = (k[0].clone().to(self.dtype), v[0].clone().to(self.dtype))
        self.kept[layer_id] = [*self.kept[layer_id][: self.num_tokens], new]
        last = self.kept[layer_id][-self.window :]
        return tuple(torch.stack(each) for each in zip(*last, strict=True))

    def advance(self) -> None:
        self.num_tokens += 1


def wrong_window(name: str) -> type:
    class Window:
        def __init__(self, layers: int, window: int, kv_heads: int, head_dim: int, dtype: Any):
            size = window + 1 if name == "one too long" else window
            size = max(1, window - 1) if name == "one too short" else size
            dtype = torch.float32 if name == "always float32" else dtype
            self.kv = torch.zeros(2, layers, size, kv_heads, head_dim, dtype=dtype)
            self.num_tokens = 1 if name == "begins at one" else 0

        def store(self, layer_id: int, k: torch.Tensor, v: torch.Tensor) -> Any:
            size = self.kv.shape[2]
            layer_id = 0 if name == "one layer for all" else layer_id
            slot = self.num_tokens % size
            if name == "stays at the last slot":
                slot = min(self.num_tokens, size - 1)
            if name == "begins again at one":
                slot = self.num_tokens if self.num_tokens < size else 1 % size
            self.kv[0, layer_id, slot] = k[0]
            if name == "values in their order":
                self.kv[1, layer_id] = self.kv[1, layer_id].roll(-1, 0)
                self.kv[1, layer_id, -1] = v[0]
            elif name != "values forgotten":
                self.kv[1, layer_id, slot] = v[0]
            if name == "keys twice":
                self.kv[1, layer_id, slot] = k[0]
            if name == "store counts":
                self.num_tokens += 1
                return self.kv[:, layer_id, : self.num_tokens]
            if name == "always the whole window":
                return self.kv[:, layer_id]
            if name == "only the new":
                return self.kv[:, layer_id, slot : slot + 1]
            if name == "without the new":
                return self.kv[:, layer_id, : self.num_tokens]
            if name == "returns None":
                return None
            return self.kv[:, layer_id, : self.num_tokens + 1]

        def advance(self) -> None:
            if name == "counts to the window":
                self.num_tokens = min(self.num_tokens + 1, self.kv.shape[2])
            elif name not in ("never advances", "store counts"):
                self.num_tokens += 1

    return Window


WRONG_WINDOWS = [
    *("one too long", "one too short", "always float32", "begins at one", "one layer for all"),
    *("stays at the last slot", "begins again at one", "values in their order"),
    *("values forgotten", "keys twice", "store counts", "always the whole window"),
    *("only the new", "without the new", "returns None", "counts to the window"),
    "never advances",
]


class RunnerOneByOne:
    """Right, and each sequence in a pass of its own."""

    def __init__(self, model: Any, kv_heads: int, windows: Any, dtype: Any = torch.float32):
        self.model, self.windows, self.sizes = model, windows, (kv_heads, model.head_dim, dtype)
        self.caches: dict[int, Any] = {}

    def logits(self, sequences: Any) -> torch.Tensor:
        return torch.stack([self._one(each) for each in sequences])

    def _one(self, sequence: Any) -> torch.Tensor:
        if sequence.num_computed == 0:
            room = len(sequence.prompt_ids) + sequence.max_output
            self.caches[sequence.sequence_id] = DenseCache(
                len(self.model.layers), room, *self.sizes
            )
        cache = self.caches[sequence.sequence_id]
        new = sequence.token_ids[cache.num_tokens :]
        positions = torch.arange(cache.num_tokens, len(sequence))
        attend = attend_dense([cache], [len(new)], self.windows)
        hidden = self.model(torch.tensor(new), positions, attend)
        cache.advance(len(new))
        return self.model.logits(hidden)[-1]

    def release(self, sequence: Any) -> None:
        if sequence.sequence_id in self.caches:
            del self.caches[sequence.sequence_id]


def wrong_runner(name: str) -> type:
    class Runner:
        def __init__(self, model: Any, kv_heads: int, windows: Any, dtype: Any = torch.float32):
            self.model, self.kv_heads, self.windows, self.dtype = model, kv_heads, windows, dtype
            self.caches: dict[int, Any] = {}
            if name == "windows forgotten":
                self.windows = [None] * len(windows)

        def logits(self, sequences: Any) -> torch.Tensor:
            caches = [self._cache(each) for each in sequences]
            new_ids = [list(each.new_ids) for each in sequences]
            if name == "last prompt token again":
                for each, ids in zip(sequences, new_ids, strict=True):
                    if each.num_computed == len(each.prompt_ids):
                        ids.insert(0, each.prompt_ids[-1])
            if name == "whole text again":
                new_ids = [list(each.token_ids) for each in sequences]
            if name == "prompt only":
                new_ids = [list(each.prompt_ids) for each in sequences]
            lengths = [len(ids) for ids in new_ids]
            starts = [cache.num_tokens for cache in caches]
            if name == "positions from zero":
                starts = [0 for _ in caches]
            if name == "positions one too far":
                starts = [start + 1 for start in starts]
            if name == "positions go on over sequences":
                starts = [sum(lengths[:place]) for place in range(len(lengths))]
            ranges = [
                torch.arange(start, start + length)
                for start, length in zip(starts, lengths, strict=True)
            ]
            flat = torch.tensor([token for ids in new_ids for token in ids])
            attend = attend_dense(caches, lengths, self.windows)
            hidden = self.model(flat, torch.cat(ranges), attend)
            for cache, length in zip(caches, lengths, strict=True):
                if name == "advances by one":
                    length = 1
                if name != "never advances":
                    cache.advance(length)
            last = torch.tensor(lengths).cumsum(0) - 1
            if name == "first rows":
                last = torch.tensor([0, *lengths[:-1]]).cumsum(0)
            if name == "row before the last":
                last = (last - 1).clamp(min=0)
            if name == "all rows":
                return self.model.logits(hidden)
            if name == "last row of all":
                return self.model.logits(hidden[-1:]).expand(len(sequences), -1)
            if name == "hidden states":
                return hidden[last]
            return self.model.logits(hidden[last])

        def release(self, sequence: Any) -> None:
            if name == "releases everybody":
                self.caches.clear()
            elif name == "release fails for strangers":
                del self.caches[sequence.sequence_id]
            elif name != "never releases":
                self.caches.pop(sequence.sequence_id, None)

        def _cache(self, sequence: Any) -> Any:
            key = 0 if name == "one cache for all" else sequence.sequence_id
            room = len(sequence.prompt_ids) + sequence.max_output
            if name == "room for the prompt only":
                room = len(sequence.prompt_ids)
            if key not in self.caches or name == "a new cache each time":
                self.caches[key] = DenseCache(
                    len(self.model.layers), room, self.kv_heads, self.model.head_dim, self.dtype
                )
            return self.caches[key]

    return Runner


WRONG_RUNNERS = [
    *("windows forgotten", "last prompt token again", "whole text again", "prompt only"),
    *("positions from zero", "positions one too far", "positions go on over sequences"),
    *("advances by one", "never advances", "first rows", "row before the last", "all rows"),
    *("last row of all", "hidden states", "releases everybody", "release fails for strangers"),
    *("never releases", "one cache for all", "room for the prompt only", "a new cache each time"),
]


def batch_from_a_table(context: int) -> int | None:
    """Right, and worked out on paper."""
    return {1: 405, 100: 619, 1000: None, 8000: None}[context]


def batch_by_search(context: int) -> float | None:
    """Right, and found by trying batches."""
    for batch in range(1, 100_000):
        read = (15.01e9 + batch * 131_072 * context) / 300e9
        if batch * (15.01e9 + 4 * 32 * 32 * 128 * context) / 121e12 >= read:
            return float(batch)
    return None


def batch_with_all_parameters(context: int) -> int | None:
    """Right within 5 %: the embedding table is counted among the weights."""
    per_sequence = (16.06e9 + 524_288 * context) / 121e12 - 131_072 * context / 300e9
    return round(16.06e9 / 300e9 / per_sequence) if per_sequence > 0 else None


def wrong_batch(name: str) -> Any:
    def part(context: int) -> Any:
        weight_bytes, kv = 15.01e9, 131_072 * context
        flops, peak, bandwidth = 15.01e9 + 524_288 * context, 121e12, 300e9
        if name == "one FLOP a weight":
            flops = 7.505e9 + 524_288 * context
        if name == "one byte a weight":
            weight_bytes = 7.505e9
        if name == "no keys and values":
            kv = 0
        if name == "query heads":
            kv *= 4
        if name == "keys only":
            kv //= 2
        if name == "one layer's keys and values":
            kv //= 32
        if name == "with sparsity":
            peak = 242e12
        if name == "gigabits":
            bandwidth = 300e9 / 8
        gained = flops / peak - kv / bandwidth
        if name == "times added":
            gained = flops / peak + kv / bandwidth
        if name == "the ridge for all":
            return 404
        if name == "the ridge alone":
            return peak / bandwidth
        if gained <= 0:
            return {"zero for never": 0, "minus one for never": -1}.get(name)
        found = weight_bytes / bandwidth / gained
        if name == "never":
            return None
        return f"{found:.0f}" if name == "text" else found

    return part


WRONG_BATCHES = [
    *("one FLOP a weight", "one byte a weight", "no keys and values", "query heads", "keys only"),
    *("one layer's keys and values", "with sparsity", "gigabits", "times added", "text"),
    *("the ridge for all", "the ridge alone", "zero for never", "minus one for never", "never"),
]


def step_in_steps(
    *,
    weights: float,
    layers: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    batch: int,
    context: int,
    bandwidth: float,
    peak: float,
    weight_bits: float = 16,
    kv_bits: float = 16,
    overhead: float = 0.0,
) -> float:
    """Right, layer by layer, and without max."""
    read = weights / 8 * weight_bits / bandwidth
    compute = batch * weights / (peak / 2)
    for _ in range(layers):
        read += 2 * kv_heads * head_dim * context * (kv_bits / 8) * batch / bandwidth
        compute += batch * q_heads * (2 * head_dim + 2 * head_dim) * context / peak
    return (read if read > compute else compute) + overhead


def wrong_step(name: str) -> Any:
    def part(**given: Any) -> Any:
        given = {"weight_bits": 16, "kv_bits": 16, "overhead": 0.0} | given
        weights, batch, context = given["weights"], given["batch"], given["context"]
        per_byte = 1 if name == "bits for bytes" else 8
        kv_heads = given["q_heads"] if name == "query heads" else given["kv_heads"]
        sides = 1 if name == "keys only" else 2
        layers = 1 if name == "one layer" else given["layers"]
        kv = sides * layers * kv_heads * given["head_dim"] * context
        kv *= given["kv_bits"] / per_byte
        if name == "no context":
            kv /= context
        if name != "one sequence's keys and values":
            kv *= batch
        num_bytes = weights * given["weight_bits"] / per_byte
        if name == "weights for each":
            num_bytes *= batch
        if name != "no keys and values":
            num_bytes += kv
        one = 2 * weights + 4 * given["layers"] * given["q_heads"] * given["head_dim"] * context
        if name == "one FLOP a weight":
            one -= weights
        if name == "scores only":
            one -= 2 * given["layers"] * given["q_heads"] * given["head_dim"] * context
        if name == "attention by KV heads":
            one = 2 * weights + 4 * given["layers"] * kv_heads * given["head_dim"] * context
        if name == "no attention":
            one = 2 * weights
        flops = one if name == "one sequence's arithmetic" else batch * one
        read, compute = num_bytes / given["bandwidth"], flops / given["peak"]
        overhead = given["overhead"]
        if name == "sum":
            return read + compute + overhead
        if name == "min":
            return min(read, compute) + overhead
        if name == "memory only":
            return read + overhead
        if name == "overhead inside":
            return max(read, compute, overhead)
        if name == "no overhead":
            return max(read, compute)
        if name == "milliseconds":
            return 1e3 * (max(read, compute) + overhead)
        if name == "a text":
            return f"{max(read, compute) + overhead} s"
        if name == "weights in 16 bits":
            return step_in_steps(**(given | {"weight_bits": 16}))
        return max(read, compute) + overhead

    return part


WRONG_STEPS = [
    *("bits for bytes", "query heads", "keys only", "one layer", "no context"),
    *("one sequence's keys and values", "weights for each", "no keys and values"),
    *("one FLOP a weight", "scores only", "attention by KV heads", "no attention"),
    *("one sequence's arithmetic", "sum", "min", "memory only", "overhead inside", "no overhead"),
    *("milliseconds", "a text", "weights in 16 bits"),
]


def prefill_token_by_token(**given: Any) -> float:
    """Right, and counts the pairs of each token."""
    given = {"weight_bits": 16, "kv_bits": 16, "overhead": 0.0} | given
    tokens, per_pair = given["prompt_tokens"], 4 * given["q_heads"] * given["head_dim"]
    flops = 2 * given["head"]
    for seen in range(1, tokens + 1):
        flops += 2 * (given["weights"] - given["head"]) + given["layers"] * per_pair * seen
    kv = 2 * given["layers"] * given["kv_heads"] * given["head_dim"] * tokens
    read = given["weights"] * given["weight_bits"] / 8 + kv * given["kv_bits"] / 8
    return given["overhead"] + max(flops / given["peak"], read / given["bandwidth"])


def wrong_prefill(name: str) -> Any:
    def part(**given: Any) -> Any:
        given = {"weight_bits": 16, "kv_bits": 16, "overhead": 0.0} | given
        tokens, weights, head = given["prompt_tokens"], given["weights"], given["head"]
        pairs = {
            "all pairs": tokens**2,
            "not itself": tokens * (tokens - 1) / 2,
            "last token only": tokens,
            "no attention": 0,
        }.get(name, tokens * (tokens + 1) / 2)
        flops = 2 * (weights - head) * tokens + 2 * head
        if name == "head for all":
            flops = 2 * weights * tokens
        if name == "no head":
            flops = 2 * (weights - head) * tokens
        if name == "one token":
            flops = 2 * weights
        if name == "one FLOP a weight":
            flops /= 2
        heads = given["kv_heads"] if name == "attention by KV heads" else given["q_heads"]
        flops += 4 * given["layers"] * heads * given["head_dim"] * pairs
        kv_heads = given["q_heads"] if name == "query heads" else given["kv_heads"]
        kv = 2 * given["layers"] * kv_heads * given["head_dim"] * tokens
        if name == "no keys and values":
            kv = 0
        read = weights * given["weight_bits"] / 8 + kv * given["kv_bits"] / 8
        if name == "weights for each":
            read *= tokens
        if name == "bits for bytes":
            read *= 8
        times = read / given["bandwidth"], flops / given["peak"]
        found = {"sum": sum, "min": min}.get(name, max)(times)
        if name == "milliseconds":
            found *= 1e3
        if name == "None":
            return None
        return found if name == "no overhead" else found + given["overhead"]

    return part


WRONG_PREFILLS = [
    *("all pairs", "not itself", "last token only", "no attention", "head for all", "no head"),
    *("one token", "one FLOP a weight", "attention by KV heads", "no keys and values"),
    *("weights for each", "bits for bytes", "sum", "min", "milliseconds", "no overhead", "None"),
    "query heads",
]


ANSWERS = {
    "DenseCache": Answers(
        right=(GrowingCache, ListedCache, wrong_cache("nothing")),
        wrong={name: wrong_cache(name) for name in WRONG_CACHES},
        equivalent={},
    ),
    "WindowCache": Answers(
        right=(KeptWindow, wrong_window("nothing")),
        wrong={name: wrong_window(name) for name in WRONG_WINDOWS},
        equivalent={},
    ),
    "DenseRunner": Answers(
        right=(RunnerOneByOne, wrong_runner("nothing")),
        wrong={name: wrong_runner(name) for name in WRONG_RUNNERS},
        equivalent={
            "True -> False": "zip's strict: the lists are as long as the sequences are many",
            "True -> False #2": "as above",
        },
    ),
    "compute_bound_batch": Answers(
        right=(
            *(batch_from_a_table, batch_by_search, batch_with_all_parameters),
            wrong_batch("nothing"),
        ),
        wrong={name: wrong_batch(name) for name in WRONG_BATCHES},
        equivalent={"gained <= 0 -> gained < 0": "the two times are never equal"},
    ),
    "step_seconds": Answers(
        right=(step_in_steps, wrong_step("nothing")),
        wrong={name: wrong_step(name) for name in WRONG_STEPS},
        equivalent={},
    ),
    "prefill_seconds": Answers(
        right=(prefill_token_by_token, wrong_prefill("nothing")),
        wrong={name: wrong_prefill(name) for name in WRONG_PREFILLS},
        equivalent={},
    ),
}
