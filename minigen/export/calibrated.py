"""Methods that watch a model run: GPTQ, AWQ, SmoothQuant, and importance for GGUF's kinds.

Calibration goes layer by layer (`minigen.quantization.calibration`). The pieces of a layer are kept
when all of them are made, so an interrupted run goes on with the next layer; finished layers run
again, with the weights of their pieces, to give the next layer its inputs.

AWQ and SmoothQuant multiply the columns of matrices by factors, and divide what produces their
inputs: a norm, or the rows of V and of the up matrix.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from minigen.checkpoint.checkpoint import Checkpoint
from minigen.errors import OptionError
from minigen.export.mixture import loss_names
from minigen.export.partial import FLOATING, PartialOutput, Piece
from minigen.export.pieces import dequantize, finite, naming, piece_of, piece_of_matrix
from minigen.export.plan import CALIBRATION_TOKENS, Plan, QuantizeOptions
from minigen.quantization.awq import (
    PRECEDING,
    ScaledMatrices,
    awq,
    fold_layer,
    rows_of_values,
    shared_by_heads,
)
from minigen.quantization.calibration import SharedInput, calibrate
from minigen.quantization.gptq import gptq
from minigen.quantization.smoothquant import smoothing_factors

WINDOW = 512  # tokens
_ALPHA = 0.5  # SmoothQuant: outliers are shared equally between activations and weights
_LAST = "mlp.down_proj.weight"
_NORMS = {
    "self_attn.q_proj": "input_layernorm",
    "mlp.gate_proj": "post_attention_layernorm",
}  # the first matrix that reads a norm's output -> the norm
_ROWS = ("self_attn.v_proj", "mlp.up_proj")  # the matrices whose rows produce another's input

Pieces = dict[str, Piece]


def read_windows(
    checkpoint: Checkpoint, options: QuantizeOptions
) -> list[Int64[Tensor, " tokens"]]:
    """Return the first tokens of the calibration text, in windows; none without a text.

    Every window begins with BOS if the tokenizer adds it to texts. Raises `OptionError` for a file
    that is not text, or too short for a whole window.
    """
    if options.calibration is None:
        return []
    try:
        text = options.calibration.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            f"The calibration text {options.calibration} cannot be read: "
            f"{getattr(error, 'strerror', None) or 'it is not UTF-8'}."
        ) from None
    tokenizer = checkpoint.tokenizer()
    most = options.calibration_tokens or CALIBRATION_TOKENS
    ids = tokenizer.encode(text[: 16 * most], add_special_tokens=False)[:most]
    framed = tokenizer.encode("a")
    first = framed[:1] if framed[:1] == [tokenizer.bos_token_id] else []
    size = min(WINDOW, checkpoint.config.max_positions) - len(first)
    if len(ids) < min(size, most):
        raise OptionError(
            f"{options.calibration} has {len(ids)} tokens; calibration needs at least "
            f"{min(size, most)}."
        )
    starts = range(0, max(len(ids) - size, 0) + 1, size)
    return [torch.tensor([*first, *ids[start : start + size]]) for start in starts]


def extra_names(checkpoint: Checkpoint, plan: Plan, options: QuantizeOptions) -> tuple[str, ...]:
    """Return the names of pieces besides the matrices: changed norms and biases, and factors."""
    if plan.method == "mixed":
        return loss_names(checkpoint)
    if options.calibration is None or plan.method not in ("awq", "smoothquant"):
        return ()
    names: list[str] = []
    for layer_id in range(checkpoint.config.num_layers):
        prefix = f"model.layers.{layer_id}."
        if plan.method == "awq":
            names += _vectors_of(checkpoint, layer_id)
        else:
            names += [f"{prefix}{norm}.weight" for norm in _NORMS.values()]
        names.append(f"{prefix}factors")
    return tuple(names)


def make_calibrated(
    checkpoint: Checkpoint,
    plan: Plan,
    partial: PartialOutput,
    windows: Sequence[Int64[Tensor, " tokens"]],
    tell: Callable[[], None],
) -> None:
    """Make the pieces of all layers that are not finished, by the plan's method."""
    if all(partial.has(name) for name in plan.made if ".layers." in name):
        return
    make = functools.partial(_MAKERS[plan.method], checkpoint, plan)
    inputs: list[SharedInput] = []

    def quantize(shared: SharedInput) -> Mapping[str, Tensor]:
        for name, weight in shared.weights.items():
            finite(name, weight)
            finite(f"The calibration input of {name}", shared.statistics.mean_square)
        inputs.append(shared)
        if not any(name.endswith(_LAST) for name in shared.weights):
            return {}
        names = [name for each in inputs for name in each.weights if partial.may_have(name)]
        if not all(partial.has(name) for name in names):
            for name, piece in make(inputs).items():
                partial.put(name, piece)
                tell()
        inputs.clear()
        return _unfolded(partial, names, shared.layer_id) if sequential else {}

    sequential = plan.method != "kind"  # an importance matrix is one of the original model
    calibrate(checkpoint.config, checkpoint.tensors, windows, quantize, sequential=sequential)


def _unfolded(partial: PartialOutput, names: Sequence[str], layer_id: int) -> dict[str, Tensor]:
    """Return a layer's weights as they act between the original norms, from its pieces alone."""
    weights = {name: dequantize(partial.get(name)) for name in names}
    prefix = f"model.layers.{layer_id}."
    if not partial.may_have(f"{prefix}factors"):
        return weights
    tensors = partial.get(f"{prefix}factors").tensors
    for name in names:
        module = name.removeprefix(prefix).removesuffix(".weight")
        if f"{module}.columns" in tensors:
            weights[name] = weights[name] / tensors[f"{module}.columns"]
        if f"{module}.rows" in tensors:
            weights[name] = weights[name] * tensors[f"{module}.rows"].unsqueeze(-1)
    return weights


def _by_importance(checkpoint: Checkpoint, plan: Plan, inputs: Sequence[SharedInput]) -> Pieces:
    return {
        name: piece_of(name, weight, plan, shared.statistics.mean_square)
        for shared in inputs
        for name, weight in shared.weights.items()
        if name in plan.made
    }


def _by_gptq(checkpoint: Checkpoint, plan: Plan, inputs: Sequence[SharedInput]) -> Pieces:
    pieces: Pieces = {}
    for shared in inputs:
        for name, weight in shared.weights.items():
            with naming(name):
                matrix = gptq(
                    weight,
                    shared.statistics.hessian,
                    plan.grids[name],
                    act_order=True,
                    clip_search=True,
                    scale_dtype=plan.scale_dtype,
                )
                pieces[name] = piece_of_matrix(matrix, plan)
    return pieces


def _by_awq(checkpoint: Checkpoint, plan: Plan, inputs: Sequence[SharedInput]) -> Pieces:
    config, prefix = checkpoint.config, f"model.layers.{inputs[0].layer_id}."
    found: list[ScaledMatrices] = []
    for shared in inputs:
        first = next(iter(shared.weights))
        magnitudes = shared.statistics.mean_abs
        if _module(first, prefix) == "self_attn.o_proj":
            magnitudes = shared_by_heads(magnitudes, config.q_heads, config.kv_heads)
        with naming(" or ".join(shared.weights)):
            scaled = awq(
                shared.weights,
                shared.statistics,
                plan.grids[first],
                magnitudes=magnitudes,
                scale_dtype=plan.scale_dtype,
            )
        found.append(scaled)
    vectors = {
        name: checkpoint.tensors[name].dequantize()
        for name in _vectors_of(checkpoint, inputs[0].layer_id)
    }
    folded = fold_layer(found, vectors, config.q_heads, config.kv_heads)
    factors: dict[str, Tensor] = {}
    for scaled in found:
        modules = [_module(name, prefix) for name in scaled.matrices]
        factors |= {f"{module}.columns": scaled.factors for module in modules}
        preceding, by = PRECEDING[modules[0]], scaled.factors
        if modules[0] == "self_attn.o_proj":
            by = rows_of_values(by, config.q_heads, config.kv_heads)
        if f"{prefix}{preceding}.weight" in folded.matrices:
            factors[f"{preceding}.rows"] = by
    changed = {name: _vector_piece(name, vector) for name, vector in folded.vectors.items()}
    matrices = {name: piece_of_matrix(matrix, plan) for name, matrix in folded.matrices.items()}
    return {f"{prefix}factors": Piece(FLOATING, factors), **changed, **matrices}


def _by_smoothing(checkpoint: Checkpoint, plan: Plan, inputs: Sequence[SharedInput]) -> Pieces:
    prefix = f"model.layers.{inputs[0].layer_id}."
    pieces: Pieces = {}
    factors: dict[str, Tensor] = {}
    for shared in inputs:
        first = _module(next(iter(shared.weights)), prefix)
        by = torch.ones(shared.statistics.columns)
        if first in _NORMS:
            by = smoothing_factors(shared.statistics.max_abs, shared.weights, _ALPHA)
            norm = f"{prefix}{_NORMS[first]}.weight"
            pieces[norm] = _vector_piece(norm, checkpoint.tensors[norm].dequantize() / by)
            factors |= {f"{_module(name, prefix)}.columns": by for name in shared.weights}
        for name, weight in shared.weights.items():
            pieces[name] = piece_of(name, weight * by, plan)
    return {f"{prefix}factors": Piece(FLOATING, factors), **pieces}


_MAKERS: dict[str, Callable[[Checkpoint, Plan, Sequence[SharedInput]], Pieces]] = {
    "kind": _by_importance,
    "gptq": _by_gptq,
    "awq": _by_awq,
    "smoothquant": _by_smoothing,
}


def _module(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).removesuffix(".weight")


def _vector_piece(name: str, vector: Float[Tensor, " size"]) -> Piece:
    """Return a norm or a bias that takes part in a division, in float32."""
    return Piece(FLOATING, {name.rpartition(".")[2]: vector})


def _vectors_of(checkpoint: Checkpoint, layer_id: int) -> list[str]:
    """Return the norms and biases of a layer that take the division by AWQ's factors."""
    prefix = f"model.layers.{layer_id}."
    names = [f"{prefix}{norm}.weight" for norm in _NORMS.values()]
    biases = [f"{prefix}{module}.bias" for module in _ROWS]
    return [*names, *(name for name in biases if name in checkpoint.tensors)]
