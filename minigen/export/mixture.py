"""Bits per matrix: measure how sensitive the model is to each one, then fill a size.

For each group of matrices that share an input (Q, K and V; gate and up), and each number of bits,
only these matrices are rounded, and the KL divergence of the model's next-token probabilities from
those of the original model is measured on a text. Engines fuse such matrices into one, so they must
have the same bits. The choice is the knapsack of `minigen.quantization.mixed`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from minigen.checkpoint.checkpoint import Checkpoint
from minigen.checkpoint.quant_formats import FORMATS
from minigen.errors import OptionError
from minigen.export.gguf_blocks import KIND_OF_GRID, kind_of_grid
from minigen.export.partial import FLOATING, PartialOutput, Piece
from minigen.export.pieces import finite, naming
from minigen.export.plan import Plan
from minigen.model.attention import attend_packed
from minigen.model.layers import rms_norm, rotary_tables
from minigen.model.transformer import Layer, build_frequencies, build_layer, run_layer
from minigen.quantization.calibration import replaced_linear
from minigen.quantization.grid import Grid, round_to_nearest
from minigen.quantization.mixed import Choice, choose_greedily

BITS = (2, 3, 4, 5, 6, 8)
TOKENS = 256  # on which each rounding is judged; the model runs over them about 700 times
DEFAULT_TARGET = 4.5
_UNITS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


def loss_names(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the names of the pieces that keep what was measured, one per layer."""
    return tuple(_losses_of(layer_id) for layer_id in range(checkpoint.config.num_layers))


def check_target(checkpoint: Checkpoint, plan: Plan, target_bits: float) -> None:
    """Raise `OptionError` if the fewest bits of every matrix, with scales, exceed the target."""
    fewest = min(_bits_of(plan))
    shapes = {name: checkpoint.tensors[name].shape for name in plan.grids}
    least = sum(_num_bytes(_grid(plan, n, fewest), s, plan.to_gguf) for n, s in shapes.items())
    total = sum(math.prod(shape) for shape in shapes.values())
    if int(total * target_bits / 8) < least:
        raise OptionError(
            f"target_bits {target_bits:g} is too small: {fewest} bits are the fewest here, and "
            f"with scales they take {math.ceil(800 * least / total) / 100:g} per weight."
        )


def added_bytes(checkpoint: Checkpoint, plan: Plan, target_bits: float) -> int:
    """Return by how much the matrices exceed those of the plan if they fill the target."""
    shapes = {name: checkpoint.tensors[name].shape for name in plan.grids}
    planned = sum(_num_bytes(plan.grids[n], s, plan.to_gguf) for n, s in shapes.items())
    return int(sum(map(math.prod, shapes.values())) * target_bits / 8) - planned


def choose_bits(
    checkpoint: Checkpoint,
    plan: Plan,
    target_bits: float,
    partial: PartialOutput,
    window: Int64[Tensor, " tokens"],
    tell: Callable[[int], None],
) -> Plan:
    """Return the plan with the bits of each matrix, of at most `target_bits` per weight.

    The size counts scales, too. `tell` gets the number of layers that are measured. The target
    must have passed `check_target`.
    """
    losses = _measure(checkpoint, plan, partial, window, tell)
    options: dict[str, tuple[Choice, ...]] = {}
    total = 0
    for (layer_id, unit), measured in losses.items():
        names = _names(layer_id, unit)
        shapes = [checkpoint.tensors[name].shape for name in names]
        total += sum(rows * columns for rows, columns in shapes)
        choices = []
        for bits, loss in zip(_bits_of(plan), measured, strict=True):
            grid = _grid(plan, names[0], bits)
            num_bytes = sum(_num_bytes(grid, shape, plan.to_gguf) for shape in shapes)
            choices.append(Choice(str(bits), num_bytes, loss))
        options[" ".join(names)] = tuple(choices)
    mixture = choose_greedily(options, int(total * target_bits / 8))
    grids = {
        name: _grid(plan, name, int(choice.form))
        for names, choice in mixture.choices.items()
        for name in names.split()
    }
    kinds = {
        name: kind_of_grid(grid.bits, grid.group_size, grid.symmetric)
        for name, grid in grids.items()
        if plan.to_gguf
    }
    return replace(plan, grids=grids, kinds={**plan.kinds, **kinds})


def _measure(
    checkpoint: Checkpoint,
    plan: Plan,
    partial: PartialOutput,
    window: Int64[Tensor, " tokens"],
    tell: Callable[[int], None],
) -> dict[tuple[int, tuple[str, ...]], list[float]]:
    """Return the loss of each unit of each layer, for each number of bits."""
    names = loss_names(checkpoint)
    if not all(partial.has(name) for name in names):
        model = _Model(checkpoint)
        states = model.states(window)
        expected = model.log_probabilities(states[-1])
        for layer_id, name in enumerate(names):
            if not partial.has(name):
                rows = [
                    [
                        model.loss(
                            layer_id,
                            _rounded(checkpoint, plan, unit_names, bits),
                            states[layer_id],
                            expected,
                        )
                        for bits in _bits_of(plan)
                    ]
                    for unit_names in (_names(layer_id, unit) for unit in _UNITS)
                ]
                partial.put(name, Piece(FLOATING, {"losses": torch.tensor(rows)}))
            tell(layer_id + 1)
    return {
        (layer_id, unit): partial.get(name).tensors["losses"][place].tolist()
        for layer_id, name in enumerate(names)
        for place, unit in enumerate(_UNITS)
    }


def _rounded(
    checkpoint: Checkpoint, plan: Plan, names: Sequence[str], bits: int
) -> dict[str, Tensor]:
    rounded = {}
    for name in names:
        weight = finite(name, checkpoint.tensors[name].dequantize())
        grid = _grid(plan, name, bits)
        with naming(name):
            matrix = round_to_nearest(weight, grid, scale_dtype=plan.scale_dtype)
        rounded[name] = matrix.dequantize()
    return rounded


class _Model:
    """The original model in float32, all layers in memory; one layer can be exchanged."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, self._config = checkpoint, checkpoint.config
        tensors = checkpoint.tensors
        self._frequencies = build_frequencies(self._config, tensors)
        self._layers = [self._layer(i, {}) for i in range(self._config.num_layers)]
        self._embedding = tensors["model.embed_tokens.weight"].dequantize()
        tied = self._config.tied_embeddings
        self._head = self._embedding if tied else tensors["lm_head.weight"].dequantize()
        self._norm = tensors["model.norm.weight"].dequantize()

    def _layer(self, layer_id: int, replaced: dict[str, Tensor]) -> Layer:
        make = replaced_linear(replaced)
        return build_layer(self._checkpoint.tensors, layer_id, torch.float32, make)

    def states(self, window: Int64[Tensor, " tokens"]) -> list[Float[Tensor, "tokens hidden"]]:
        """Return the input of each layer, and the output of the last one."""
        states = [self._embedding[window]]
        for layer_id, layer in enumerate(self._layers):
            states.append(self._run(layer_id, layer, states[-1]))
        return states

    def loss(
        self,
        layer_id: int,
        replaced: dict[str, Tensor],
        state: Float[Tensor, "tokens hidden"],
        expected: Float[Tensor, "tokens vocab"],
    ) -> float:
        """Return the mean KL divergence, in nats per token, with matrices of one layer replaced."""
        state = self._run(layer_id, self._layer(layer_id, replaced), state)
        for later in range(layer_id + 1, len(self._layers)):
            state = self._run(later, self._layers[later], state)
        found = self.log_probabilities(state)
        return float((expected.exp() * (expected - found)).sum(-1).mean())

    def log_probabilities(
        self, state: Float[Tensor, "tokens hidden"]
    ) -> Float[Tensor, "tokens vocab"]:
        """Return the logarithms of the next-token probabilities."""
        normalized = rms_norm(state, self._norm, self._config.norm_eps)
        return torch.log_softmax(normalized @ self._head.T, dim=-1)

    def _run(
        self, layer_id: int, layer: Layer, state: Float[Tensor, "tokens hidden"]
    ) -> Float[Tensor, "tokens hidden"]:
        rotation = rotary_tables(self._frequencies, torch.arange(len(state)))
        attend = attend_packed([len(state)], self._config.sliding_windows)
        return run_layer(
            layer,
            state,
            rotation,
            lambda q, k, v: attend(layer_id, q, k, v),
            self._config.head_dim,
            self._config.norm_eps,
        )


def _names(layer_id: int, unit: Sequence[str]) -> list[str]:
    return [f"model.layers.{layer_id}.{module}.weight" for module in unit]


def _losses_of(layer_id: int) -> str:
    return f"model.layers.{layer_id}.losses"


def _bits_of(plan: Plan) -> tuple[int, ...]:
    symmetric = next(iter(plan.grids.values())).symmetric
    return tuple(n for n in BITS if not plan.to_gguf or (n, symmetric) in KIND_OF_GRID)


def _num_bytes(grid: Grid, shape: tuple[int, ...], in_gguf: bool) -> int:
    """Return the bytes of a matrix: in GGUF, an asymmetric group stores its minimum in float16."""
    rows, columns = shape
    if not in_gguf:
        return grid.num_bytes(rows, columns)
    kind = kind_of_grid(grid.bits, grid.group_size, grid.symmetric)
    return rows * FORMATS[kind].row_bytes(columns)


def _grid(plan: Plan, name: str, bits: int) -> Grid:
    return replace(plan.grids[name], bits=bits)
