"""What a model's layers read, and matrices that are rounded with the knowledge of it.

The two texts are those of `benchmarks/35_quantization.py`: the methods see one of them only.
"""

import math
import pydoc_data.topics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from minigen import LLM, hub
from minigen.checkpoint.checkpoint import Checkpoint, open_checkpoint
from minigen.model.attention import attend_packed
from minigen.model.layers import DenseLinear, rms_norm
from minigen.model.transformer import run_layer
from minigen.quantization.awq import awq, channel_factors, shared_by_heads
from minigen.quantization.calibration import InputStatistics, SharedInput, calibrate
from minigen.quantization.gptq import gptq
from minigen.quantization.grid import (
    Grid,
    choose_scales,
    relative_error,
    round_to_nearest,
    split_groups,
)
from minigen.quantization.smoothquant import round_rows_to_int8, smoothing_factors
from minigen.tokenizer.tokenizer import Tokenizer
from minigen_course.lab.inspect_model import transformer_of
from minigen_course.lab.texts import ALICE

INPUTS = ("qkv", "out", "gate_up", "down")
Matrix = Float[Tensor, "rows columns"]


@cache
def topics() -> tuple[str, str]:
    """Return a text to calibrate on and one to measure on, from the topics of Python's `help()`.

    Every second topic is measured. Topics quote each other, so paragraphs that occur in a measured
    topic are left out of the others. The benchmark has the same two texts.
    """
    found = pydoc_data.topics.topics
    names = sorted(found)
    held_out = "\n\n".join(found[name].strip() for name in names[1::2])
    seen = {each.strip() for each in held_out.split("\n\n")}
    kept = [
        paragraph
        for name in names[::2]
        for paragraph in found[name].strip().split("\n\n")
        if paragraph.strip() not in seen
    ]
    return "\n\n".join(kept), held_out


def texts() -> dict[str, str]:
    """Return the texts of this chapter: one to calibrate on, and two that it did not see."""
    seen, held_out = topics()
    return {"seen": seen, "held-out topics": held_out, "Alice": ALICE}


def default_checkpoint() -> Checkpoint:
    """Return the default model's stored tensors and configuration."""
    return open_checkpoint(hub.resolve(hub.DEFAULT_MODEL))


@cache
def first_ids(tokenizer: Tokenizer, text: str, count: int | None = None) -> tuple[int, ...]:
    """Return the first `count` tokens of a text (all if None), without BOS; it is encoded once."""
    if count is None:
        return tuple(tokenizer.encode(text, add_special_tokens=False))
    return first_ids(tokenizer, text)[:count]


def windows(
    tokenizer: Tokenizer, text: str, count: int, length: int
) -> list[Int64[Tensor, " tokens"]]:
    """Return `count` windows of `length` tokens, evenly spread over a text; no BOS is added."""
    ids = torch.tensor(first_ids(tokenizer, text))
    whole = list(ids[: len(ids) // length * length].split(length))
    if count > len(whole):
        raise ValueError(f"the text has {len(whole)} windows of {length} tokens, not {count}")
    return [whole[i * len(whole) // count] for i in range(count)]


def inputs_of(
    checkpoint: Checkpoint, pieces: Sequence[Int64[Tensor, " tokens"]], layer_id: int
) -> dict[str, SharedInput]:
    """Return the four inputs of a layer with the matrices that read them: qkv, out, gate_up, down.

    The layers before it run as they are; those after it do not run. All tokens count once.
    """
    found: dict[str, SharedInput] = {}

    def keep(shared: SharedInput) -> dict[str, Tensor]:
        found[INPUTS[len(found)]] = shared
        return {}

    config = replace(checkpoint.config, num_layers=layer_id + 1)
    parts = (config, checkpoint.tensors, pieces, keep)
    calibrate(*parts, sequential=False, weigh_first=False, first_layer=layer_id)
    return found


def output_error(shared: SharedInput, rounded: Mapping[str, Tensor]) -> float:
    """Return the relative error of the outputs of matrices that share an input."""
    statistics = shared.statistics
    wrong = sum(statistics.output_error(rounded[n] - w) for n, w in shared.weights.items())
    whole = sum(statistics.output_error(w) for w in shared.weights.values())
    return math.sqrt(wrong / whole)


def rounded_by(
    method: str, shared: SharedInput, grid: Grid, checkpoint: Checkpoint
) -> dict[str, Matrix]:
    """Return the matrices of an input, rounded by RTN, AWQ or GPTQ with what calibration saw.

    No method searches the ranges of groups, so that they differ only in what they know of inputs.
    """
    if method == "RTN":
        return {n: round_to_nearest(w, grid).dequantize() for n, w in shared.weights.items()}
    if method == "GPTQ":
        hessian = shared.statistics.hessian
        return {n: gptq(w, hessian, grid).dequantize() for n, w in shared.weights.items()}
    magnitudes = shared.statistics.mean_abs
    if any("o_proj" in name for name in shared.weights):
        config = checkpoint.config
        magnitudes = shared_by_heads(magnitudes, config.q_heads, config.kv_heads)
    found = awq(shared.weights, shared.statistics, grid, magnitudes=magnitudes, clip_search=False)
    return {name: found.dequantize(name) for name in shared.weights}


def search_errors(shared: SharedInput, grid: Grid, alphas: Sequence[float]) -> list[float]:
    """Return the squared error of the outputs for each exponent of AWQ's factors."""
    errors = []
    for alpha in alphas:
        factors = channel_factors(shared.statistics.mean_abs, alpha)
        errors.append(
            sum(
                shared.statistics.output_error(
                    round_to_nearest(w * factors, grid).dequantize() / factors - w
                )
                for w in shared.weights.values()
            )
        )
    return errors


def column_rounder(
    weight: Matrix, grid: Grid
) -> Callable[[Float[Tensor, " rows"], int], Float[Tensor, " rows"]]:
    """Return a function of a column and its place: the column on the grid of its groups.

    The grid of each group is chosen from `weight` as it is now.
    """
    size = grid.size_of_group(weight.shape[1])
    scales, zeros = choose_scales(split_groups(weight, grid), grid)

    def rounded(column: Float[Tensor, " rows"], i: int) -> Float[Tensor, " rows"]:
        scale, zero = scales[:, i // size], zeros[:, i // size]
        return (torch.round(column / scale + zero).clamp(0, grid.max_code) - zero) * scale

    return rounded


def first_token_errors(
    llm: LLM,
    texts: Mapping[str, str],
    layer_id: int,
    grid: Grid,
    counts: Sequence[int],
    length: int = 128,
) -> dict[str, tuple[float, float]]:
    """Return how wrong the values of a window's first token are, and those of all others.

    A layer's matrix of values is rounded to nearest, and by GPTQ with the first token of a window
    counted several times. Calibration has 8 windows of the text "seen", and the errors are those of
    2 windows of "held-out topics".
    """
    seen, unseen = (
        torch.stack(
            [
                _normalized(llm, each.tolist(), layer_id)
                for each in windows(llm.tokenizer, texts[name], count, length)
            ]
        )
        for name, count in (("seen", 8), ("held-out topics", 2))
    )
    qkv = transformer_of(llm).layers[layer_id].qkv
    assert isinstance(qkv, DenseLinear)
    weight = qkv.weight.split(qkv.parts)[2]

    def errors(rounded: Matrix) -> tuple[float, float]:
        made, right = unseen @ rounded.T, unseen @ weight.T
        return tuple(  # type: ignore[return-value]
            relative_error(right[:, part].flatten(1), made[:, part].flatten(1))
            for part in (slice(1), slice(1, None))
        )

    found = {"RTN": errors(round_to_nearest(weight, grid).dequantize())}
    for count in counts:
        weights = torch.ones(seen.shape[1])
        weights[0] = count
        x = (seen * weights.sqrt().unsqueeze(-1)).flatten(0, 1)
        found[f"GPTQ, first x {count}"] = errors(gptq(weight, x.T @ x, grid).dequantize())
    return found


def qkv_inputs(llm: LLM, text: str, layer_id: int, count: int) -> Float[Tensor, "tokens hidden"]:
    """Return what Q, K and V of a layer read, for the first `count` tokens of a text."""
    return _normalized(llm, first_ids(llm.tokenizer, text, count), layer_id)


@torch.inference_mode()
def _normalized(
    llm: LLM, token_ids: Sequence[int], layer_id: int
) -> Float[Tensor, "tokens hidden"]:
    model = transformer_of(llm)
    attend = attend_packed([len(token_ids)], llm.config.sliding_windows)
    rotation = model.rotation(torch.arange(len(token_ids)))
    states = model.embed(torch.tensor(token_ids))
    for each, layer in enumerate(model.layers[:layer_id]):  # those after it do not run
        in_layer = partial(attend, each)
        states = run_layer(layer, states, rotation, in_layer, model.head_dim, model.norm_eps)
    return rms_norm(states, model.layers[layer_id].attention_norm, model.norm_eps)


def int8_output_error(
    shared: SharedInput, x: Float[Tensor, "tokens columns"], alpha: float | None
) -> float:
    """Return the relative error of a product in int8 (W8A8), smoothed by `alpha` unless None."""
    factors = torch.ones(x.shape[1])
    if alpha is not None:
        factors = smoothing_factors(shared.statistics.max_abs, shared.weights, alpha)
    weight = torch.cat([*shared.weights.values()])
    codes, scales = round_rows_to_int8(weight * factors)
    inputs, steps = round_rows_to_int8(x / factors)
    return relative_error(x @ weight.T, inputs.float() @ codes.float().T * steps * scales.T)


def step_errors(
    steps: Sequence[Matrix], weight: Matrix, hessian: Float[Tensor, "columns columns"]
) -> list[float]:
    """Return the relative error of the outputs after each of GPTQ's columns."""
    statistics = InputStatistics(weight.shape[1], 1)
    statistics.hessian = hessian
    whole = statistics.output_error(weight)
    return [math.sqrt(max(statistics.output_error(each - weight), 0) / whole) for each in steps]


def plain_steps(weight: Matrix, grid: Grid) -> list[Matrix]:
    """Return the matrix after 0, 1, ... columns of rounding to nearest."""
    rounded = round_to_nearest(weight, grid).dequantize()
    columns = torch.arange(weight.shape[1])
    return [torch.where(columns < count, rounded, weight) for count in range(len(columns) + 1)]
