"""The model with rounded matrices or a rounded cache: sensitivities, keys and values, speed."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from minigen import LLM, SamplingParams
from minigen.bench.perplexity import ROWS, EngineRows, Rows, Window, score
from minigen.kv_cache.quantized import GROUP, dequantize, group_size, quantize
from minigen.model.attention import attend_packed
from minigen.model.layers import DenseLinear
from minigen.model.transformer import Layer, run_layer
from minigen.quantization.grid import Grid, relative_error, round_to_nearest
from minigen.quantization.mixed import (
    Choice,
    choose_exhaustively,
    choose_greedily,
    least_loss_bound,
)
from minigen_course.lab.inspect_model import recorded_heads, transformer_of

Matrix = Float[Tensor, "rows columns"]
PARTS = {"q": "qkv", "k": "qkv", "v": "qkv", "out": "out", "gate": "gate_up", "down": "down"}


class Probe:
    """Runs a model whose matrices of one layer are replaced; the layers before it run once.

    `llm` must run layer by layer, in float32.
    """

    def __init__(self, llm: LLM, token_ids: Sequence[int], layer_id: int):
        self.model, self.layer = transformer_of(llm), transformer_of(llm).layers[layer_id]
        self.layer_id = layer_id
        self.attend = attend_packed([len(token_ids)], llm.config.sliding_windows)
        self.rotation = self.model.rotation(torch.arange(len(token_ids)))
        self.weights = {name: self._weight(name) for name in PARTS}
        with torch.inference_mode():
            self.states = self.model.embed(torch.tensor(token_ids))
            for each in range(layer_id):
                self.states = self._run(each, self.model.layers[each], self.states)
            self.reference = self._log_probs(self.layer)
            self.probabilities = self.reference.exp()

    @torch.inference_mode()
    def divergence(self, replaced: Mapping[str, Matrix]) -> float:
        """Return the mean KL divergence from the model itself to the one with these matrices."""
        found = self._log_probs(self._changed(replaced))
        terms = torch.sub(self.reference, found, out=found).mul_(self.probabilities)  # in its place
        return max(0.0, float(terms.sum(-1).mean()))

    def _log_probs(self, layer: Layer) -> Float[Tensor, "tokens vocab"]:
        x = self._run(self.layer_id, layer, self.states)
        for each in range(self.layer_id + 1, len(self.model.layers)):
            x = self._run(each, self.model.layers[each], x)
        return self.model.logits(x).log_softmax(-1)

    def _run(self, layer_id: int, layer: Layer, x: Tensor) -> Tensor:
        attend = partial(self.attend, layer_id)
        model = self.model
        return run_layer(layer, x, self.rotation, attend, model.head_dim, model.norm_eps)

    def _changed(self, replaced: Mapping[str, Matrix]) -> Layer:
        changed = self.layer
        for name, weight in replaced.items():
            linear = self._linear(changed, PARTS[name])
            rows = [*linear.weight.split(linear.parts)]
            rows[self._place(name)] = weight
            made = DenseLinear(torch.cat(rows), linear.bias, linear.parts)
            changed = replace(changed, **{PARTS[name]: made})  # type: ignore[arg-type]
        return changed

    def _weight(self, name: str) -> Matrix:
        linear = self._linear(self.layer, PARTS[name])
        return linear.weight.split(linear.parts)[self._place(name)]

    def _linear(self, layer: Layer, name: str) -> DenseLinear:
        linear = getattr(layer, name)
        assert isinstance(linear, DenseLinear)
        return linear

    def _place(self, name: str) -> int:
        return "qkv".index(name) if name in "qkv" else 0


def sensitivities(
    llm: LLM, token_ids: Sequence[int], layer_id: int, bits: Sequence[int], group_size: int = 64
) -> dict[str, tuple[Choice, ...]]:
    """Return what each of six matrices costs the model if it alone has some number of bits."""
    probe = Probe(llm, token_ids, layer_id)
    grids = {each: Grid(each, group_size, symmetric=False) for each in bits}
    return {
        name: tuple(
            Choice(
                str(each),
                grid.num_bytes(*weight.shape),
                probe.divergence({name: round_to_nearest(weight, grid).dequantize()}),
            )
            for each, grid in grids.items()
        )
        for name, weight in probe.weights.items()
    }


def layer_divergence(
    llm: LLM, token_ids: Sequence[int], layer_id: int, rounded: Callable[[Matrix], Matrix]
) -> float:
    """Return the model's KL divergence from itself if six matrices of a layer are rounded."""
    probe = Probe(llm, token_ids, layer_id)
    return probe.divergence({name: rounded(weight) for name, weight in probe.weights.items()})


def by_size(choices: Mapping[str, Sequence[Choice]], num_sizes: int = 11) -> list[dict[str, float]]:
    """Return the loss of the greedy choice, the optimum and the bound for sizes from least up."""
    least, most = (
        sum(pick(each.num_bytes for each in own) for own in choices.values()) for pick in (min, max)
    )
    sizes = [least + (most - least) * part // (num_sizes - 1) for part in range(num_sizes)]
    return [
        {
            "bytes": size,
            "greedy": choose_greedily(choices, size).loss,
            "optimum": choose_exhaustively(choices, size).loss,
            "bound": least_loss_bound(choices, size),
        }
        for size in sizes
    ]


# Keys and values


@dataclass(frozen=True)
class Kept:
    """The keys and values of one layer for a text, as a cache would keep them."""

    keys: Float[Tensor, "tokens kv_heads head_dim"]
    values: Float[Tensor, "tokens kv_heads head_dim"]


def keys_and_values(llm: LLM, token_ids: Sequence[int]) -> list[Kept]:
    """Return each layer's keys (rotated) and values of a text, in whole groups of tokens."""
    ids = token_ids[: len(token_ids) // GROUP * GROUP]
    return [Kept(each.k, each.v) for each in recorded_heads(llm, ids)]


def along(x: Float[Tensor, "tokens kv_heads head_dim"], per: str, bits: int) -> float:
    """Return the relative error with a grid per "channel" (of 32 tokens), or per "token"."""
    dim = {"channel": 0, "token": 2}[per]
    groups = x.unflatten(dim, (-1, group_size(x.shape[dim])))
    rounded = dequantize(*quantize(groups, dim + 1, bits)).view_as(x)
    return relative_error(x.flatten(1), rounded.flatten(1))


def cache_errors(layers: Sequence[Kept]) -> dict[str, dict[int, float]]:
    """Return the mean error over layers of keys and values, both ways, at 8, 4 and 2 bits."""
    found: dict[str, dict[int, float]] = {}
    for kind in ("keys", "values"):
        for per in ("channel", "token"):
            found[f"{kind} per {per}"] = {
                bits: sum(along(getattr(each, kind), per, bits) for each in layers) / len(layers)
                for bits in (8, 4, 2)
            }
    return found


def kept_rows(llm: LLM, token_ids: Sequence[int]) -> Rows:
    """Return the logits of one window of a text, computed once for several calls of `score`."""
    rows = [each.clone() for each in EngineRows(llm)(token_ids, 1, ROWS)]
    return lambda token_ids, first, num_rows: iter(rows)


def cache_quality(llm: LLM, reference: Rows, token_ids: Sequence[int]) -> tuple[float, float]:
    """Compare an engine with one whose cache is in full precision, on one window of a text.

    `reference` is what `kept_rows` returns for that engine and the same tokens. Returns the mean KL
    divergence, and the share of places with the same likeliest token.
    """
    window = Window(0, 1, len(token_ids))
    found = score(EngineRows(llm), reference, token_ids, [window], None)
    assert found.kl is not None
    assert found.same_top is not None
    return float(found.kl.mean()), float(found.same_top.mean())


def kv_bytes(llm: LLM) -> int:
    """Return the bytes of one token's keys and values in all layers, grids included."""
    with llm.count_work() as work:
        return work.kv_bytes * llm.config.num_layers


# Speed


def tokens_per_second(llms: Mapping[str, LLM], count: int = 24, turns: int = 2) -> dict[str, float]:
    """Return how fast each engine decodes one sequence, by turns: the fastest turn counts."""
    params = SamplingParams(temperature=0, max_tokens=count + 1, ignore_eos=True)
    best = dict.fromkeys(llms, float("inf"))
    for _ in range(turns):
        for name, llm in llms.items():
            times = [time.perf_counter() for _ in llm.stream_deltas(["The sea was"], params)]
            best[name] = min(best[name], times[-1] - times[0])
    return {name: count / each for name, each in best.items()}
