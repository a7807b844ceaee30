"""Checks of chapter 13: positions, the rotary embedding and its rows, RMSNorm and SwiGLU."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minigen.model.layers import (
    apply_rotary,
    apply_rotary_interleaved,
    rotary_frequencies,
    rotary_tables,
)
from minigen_course.grading.exercise import expect, expect_close, expect_equal

Encode = Callable[[Tensor, int], Tensor]
DependsOnDistanceOnly = Callable[[Encode, int], object]
UnpermutedRows = Callable[[int, int], Tensor]
RmsNorm = Callable[[Tensor, Tensor, float], Tensor]
Rotate = Callable[[Tensor, Tensor, Tensor], Tensor]
Swiglu = Callable[[Tensor, Tensor], Tensor]


def _random(*shape: int, seed: int = 13) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _called(part: Callable[..., Tensor], *given: Tensor | float) -> Tensor:
    """Return the part's result; expect it to be a tensor, and the arguments to be unchanged."""
    before = [each.clone() if isinstance(each, Tensor) else each for each in given]
    found = part(*given)
    expect(isinstance(found, Tensor), f"returned {type(found).__name__}; return a tensor.")
    for number, (now, then) in enumerate(zip(given, before, strict=True), 1):
        if isinstance(now, Tensor) and isinstance(then, Tensor):
            message = f"changed argument {number}; return a new tensor."
            expect(torch.equal(now, then), message)
    return found


def _expect_type(found: Tensor, dtype: torch.dtype) -> None:
    expect_equal(str(found.dtype), str(dtype), "the dtype of the result")


BASE = 10_000.0


def _turned(vector: Tensor, position: float, rotate: Rotate = apply_rotary) -> Tensor:
    """Return a query or a key, rotated to a position."""
    frequencies = rotary_frequencies(len(vector), BASE)
    angles = torch.tensor([[position]]) * frequencies
    return rotate(vector[None, None], angles.cos(), angles.sin())[0, 0]


def _wave(head_dim: int, position: int) -> Tensor:
    """Return a sinusoidal position vector."""
    cos, sin = rotary_tables(rotary_frequencies(head_dim, BASE), torch.tensor([position]))
    return torch.cat([sin[0], cos[0]])


def _expect_verdicts(
    part: DependsOnDistanceOnly, encodings: dict[str, Encode], right: bool
) -> None:
    """Expect the part to say whether scores depend on the distance alone, for each encoding."""
    for name, encode in encodings.items():
        for head_dim in (64, 6):
            found = part(encode, head_dim)
            is_bool = isinstance(found, bool) or (
                isinstance(found, Tensor) and found.dtype == torch.bool and found.numel() == 1
            )
            message = f"returned {type(found).__name__}; it should return True or False."
            expect(is_bool, message)
            what = f"for an encoding of {head_dim} numbers that {name}"
            expect_equal(bool(found), right, what)


def rotations_pass(part: DependsOnDistanceOnly) -> None:
    """rotations, whose scores depend on the distance alone:"""
    encodings: dict[str, Encode] = {
        "rotates pairs": _turned,
        "rotates pairs the other way": lambda vector, position: _turned(vector, -position),
        "rotates neighbours": lambda vector, position: _turned(
            vector, position, apply_rotary_interleaved
        ),
        "rotates and doubles": lambda vector, position: 2 * _turned(vector, position),
    }
    _expect_verdicts(part, encodings, True)


def other_encodings_pass(part: DependsOnDistanceOnly) -> None:
    """encodings that shift a vector's numbers, or leave it as it is:"""
    encodings: dict[str, Encode] = {
        "shifts the numbers in a circle": lambda vector, position: vector.roll(position),
        "ignores the position": lambda vector, position: vector.clone(),
    }
    _expect_verdicts(part, encodings, True)


def added_positions_fail(part: DependsOnDistanceOnly) -> None:
    """encodings that add a vector for the position:"""
    encodings: dict[str, Encode] = {
        "adds a sinusoidal vector": lambda vector, position: vector + _wave(len(vector), position),
        "adds a small vector (scores differ by more than 0.01)": lambda vector, position: (
            vector + 0.05 * _wave(len(vector), position)
        ),
    }
    _expect_verdicts(part, encodings, False)


def other_uses_of_the_position_fail(part: DependsOnDistanceOnly) -> None:
    """encodings whose scores depend on where the tokens are:"""
    encodings: dict[str, Encode] = {
        "grows with the position": lambda vector, position: vector * (1 + position / 20),
        "rotates by the square of the position": lambda vector, position: _turned(
            vector, position**2
        ),
        "stops to rotate after position 40": lambda vector, position: _turned(
            vector, min(position, 40)
        ),
        "rotates at every second position only": lambda vector, position: _turned(
            vector, position - position % 2
        ),
        "adds a vector that comes again after 16 positions": lambda vector, position: (
            _turned(vector, position) + _wave(len(vector), position % 16)
        ),
    }
    _expect_verdicts(part, encodings, False)


ROWS = ("row", "number")


def a_row_is_divided_by_its_root_mean_square(part: RmsNorm) -> None:
    """the row 1, 1, 7, 7, whose root mean square is 5:"""
    found = _called(part, torch.tensor([[1.0, 1.0, 7.0, 7.0]]), torch.ones(4), 0.0)
    expect_close(found, torch.tensor([[0.2, 0.2, 1.4, 1.4]]), "the row", ROWS)


def every_row_has_its_own_size(part: RmsNorm) -> None:
    """rows of different sizes, in a matrix and in a stack of two:"""
    x = torch.tensor([[1.0, 1.0, 7.0, 7.0], [2.0, 2.0, 14.0, -14.0], [0.3, 0.3, 0.3, 0.3]])
    right = torch.tensor([[0.2, 0.2, 1.4, 1.4], [0.2, 0.2, 1.4, -1.4], [1.0, 1.0, 1.0, 1.0]])
    expect_close(_called(part, x, torch.ones(4), 0.0), right, "the rows", ROWS)
    deep = _called(part, torch.stack([x, 3 * x]), torch.ones(4), 0.0)
    expect_close(deep, torch.stack([right, right]), "the rows of the stack", ("block", *ROWS))


def the_mean_stays(part: RmsNorm) -> None:
    """the mean is not subtracted, unlike in LayerNorm:"""
    found = _called(part, torch.full((1, 4), 5.0), torch.ones(4), 0.0)
    expect_close(found, torch.ones(1, 4), "the row 5, 5, 5, 5", ROWS)


def the_weight_scales_each_number(part: RmsNorm) -> None:
    """a different weight for each number of a row:"""
    x = torch.tensor([[1.0, 1.0, 7.0, 7.0], [7.0, 7.0, 1.0, 1.0]])
    found = _called(part, x, torch.tensor([1.0, 2.0, 3.0, -1.0]), 0.0)
    right = torch.tensor([[0.2, 0.4, 4.2, -1.4], [1.4, 2.8, 0.6, -0.2]])
    expect_close(found, right, "the rows", ROWS)


def eps_is_added_to_the_mean_square(part: RmsNorm) -> None:
    """eps is added to the mean square under the root, and prevents 0 / 0:"""
    found = _called(part, torch.tensor([[0.3, -0.3, 0.3, 0.3]]), torch.ones(4), 0.16)
    expect_close(found, torch.tensor([[0.6, -0.6, 0.6, 0.6]]), "with eps = 0.16", ROWS)
    expect_close(
        _called(part, torch.zeros(1, 4), torch.ones(4), 1e-5),
        torch.zeros(1, 4),
        "a row of zeros",
        ROWS,
    )


def squares_do_not_overflow_in_sixteen_bits(part: RmsNorm) -> None:
    """float16 numbers whose squares overflow in float16:"""
    x = torch.tensor([[1000.0, 1000.0, 7000.0, -7000.0]], dtype=torch.float16)
    found = _called(part, x, torch.ones(4, dtype=torch.float16), 1e-5)
    _expect_type(found, torch.float16)
    right = torch.tensor([[0.2, 0.2, 1.4, -1.4]])
    expect_close(found, right, "the row (compute in float32)", ROWS, tolerance=1e-2)


HEADS = ("token", "head", "number")


def _rotated(part: Rotate, x: Tensor, angles: Tensor) -> Tensor:
    return _called(part, x, angles.cos(), angles.sin())


def at_position_0_nothing_turns(part: Rotate) -> None:
    """an angle of 0:"""
    x = _random(1, 2, 6)
    expect_close(_rotated(part, x, torch.zeros(1, 3)), x, "a token at position 0", HEADS)


def a_quarter_turn_swaps_a_pair(part: Rotate) -> None:
    """the head 1, 2, 3, 4, of which only the first pair is rotated, by 90 degrees:"""
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    cos, sin = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    found = _called(part, x, cos, sin)
    neighbours = found.shape == x.shape and torch.allclose(
        found, apply_rotary_interleaved(x, cos, sin)
    )
    message = "paired the neighbours 2i and 2i + 1; number i should pair with i + head_dim/2."
    expect(not neighbours, message)
    right = torch.tensor([[[-3.0, 2.0, 1.0, 4.0]]])
    expect_close(found, right, "the head (the point (1, 3) becomes (-3, 1))", HEADS)


def every_pair_and_token_has_its_own_angle(part: Rotate) -> None:
    """five tokens with three heads, an angle for each token and pair:"""
    x, angles = _random(5, 3, 10), _random(5, 5, seed=14)
    numbers = torch.complex(*x.chunk(2, dim=-1)) * torch.complex(
        angles.cos(), angles.sin()
    ).unsqueeze(1)
    right = torch.cat([numbers.real, numbers.imag], dim=-1)
    expect_close(_rotated(part, x, angles), right, "the heads", HEADS)


def sixteen_bits_are_turned_in_float32(part: Rotate) -> None:
    """heads in bfloat16, rotated in float32 and rounded once at the end:"""
    x, angles = _random(40, 2, 64).bfloat16(), _random(40, 32, seed=15)
    found = _rotated(part, x, angles)
    _expect_type(found, torch.bfloat16)
    right = _reference(x.double(), angles.cos().double(), angles.sin().double()).float()
    expect_close(found, right, "the heads", HEADS, tolerance=5e-3)
    error = float((found.float() - right).abs().mean())
    expect(
        error < 0.0017, "rounded between the steps; the result should be rounded once, at the end."
    )


def _reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    numbers = torch.complex(*x.chunk(2, dim=-1)) * torch.complex(cos, sin).unsqueeze(1)
    return torch.cat([numbers.real, numbers.imag], dim=-1)


def _order(part: UnpermutedRows, num_rows: int, heads: int) -> list[int]:
    found = part(num_rows, heads)
    expect(isinstance(found, Tensor), f"returned {type(found).__name__}; return a tensor.")
    expect_equal(list(found.shape), [num_rows], f"the shape of the order of {num_rows} rows")
    expect_equal(str(found.dtype), "torch.int64", "the order's dtype (it indexes rows)")
    order: list[int] = found.tolist()
    expect_equal(sorted(order), list(range(num_rows)), "the order, sorted (every row once)")
    return order


def _stored(rows: Sequence[str], heads: int) -> list[str]:
    """Return rows as llama.cpp's converter stores them: each head's two halves interleaved."""
    size = len(rows) // heads
    stored = []
    for start in range(0, len(rows), size):
        head = rows[start : start + size]
        first, second = head[: size // 2], head[size // 2 :]
        stored += [row for pair in zip(first, second, strict=True) for row in pair]
    return stored


def one_heads_evens_come_before_its_odds(part: UnpermutedRows) -> None:
    """one head of eight rows:"""
    expect_equal(_order(part, 8, 1), [0, 2, 4, 6, 1, 3, 5, 7], "the order")


def rows_stay_in_their_head(part: UnpermutedRows) -> None:
    """two heads of four rows, and three of six:"""
    expect_equal(_order(part, 8, 2), [0, 2, 1, 3, 4, 6, 5, 7], "the order for two heads")
    right = [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11, 12, 14, 16, 13, 15, 17]
    expect_equal(_order(part, 18, 3), right, "the order for three heads")


def it_undoes_what_the_converter_did(part: UnpermutedRows) -> None:
    """rows that llama.cpp's converter has stored:"""
    for heads, size in ((9, 64), (3, 64), (1, 2), (4, 10)):
        rows = [f"head {head} row {row}" for head in range(heads) for row in range(size)]
        stored = _stored(rows, heads)
        back = [stored[place] for place in _order(part, len(rows), heads)]
        expect_equal(back, rows, f"{heads} heads of {size} rows after storing and reordering")


def a_whole_head_is_rotated_as_before(part: Rotate) -> None:
    """heads of 10 numbers and five cosines, so that every number is rotated:"""
    x, angles = _random(4, 3, 10), _random(4, 5, seed=14)
    right = _reference(x, angles.cos(), angles.sin())
    expect_close(_rotated(part, x, angles), right, "the heads", HEADS)


def a_pair_lies_within_the_rotated_part(part: Rotate) -> None:
    """the head 1, 2, ..., 8 and two cosines; only the first pair is rotated, by 90 degrees:"""
    x = torch.arange(1.0, 9).reshape(1, 1, 8)
    found = _called(part, x, torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]]))
    right = torch.tensor([[[-3.0, 2.0, 1.0, 4.0, 5.0, 6.0, 7.0, 8.0]]])
    expect_close(found, right, "the head (the point (1, 3) becomes (-3, 1))", HEADS)


def the_other_numbers_stay_as_they_are(part: Rotate) -> None:
    """a quarter of heads of 16 numbers in bfloat16, for several tokens:"""
    x, angles = _random(7, 3, 16).bfloat16(), _random(7, 2, seed=15)
    found = _rotated(part, x, angles)
    _expect_type(found, torch.bfloat16)
    expect_equal(list(found.shape), list(x.shape), "the shape of the result")
    expect(torch.equal(found[..., 4:], x[..., 4:]), "numbers after the fourth should not change.")
    right = _reference(x[..., :4].double(), angles.cos().double(), angles.sin().double())
    expect_close(found[..., :4], right, "the rotated numbers", HEADS, tolerance=2e-2)


UNITS = ("token", "unit")


def a_gate_of_0_lets_nothing_through(part: Swiglu) -> None:
    """gates of 0:"""
    found = _called(part, torch.zeros(1, 3), torch.tensor([[1.0, -2.0, 3.0]]))
    expect_close(found, torch.zeros(1, 3), "the result", UNITS)


def an_open_gate_lets_gate_times_up_through(part: Swiglu) -> None:
    """gates far above 0, where the sigmoid is 1, and far below, where it is 0:"""
    gate = torch.tensor([[20.0, 200.0, -200.0, -20.0]])
    found = _called(part, gate, torch.tensor([[3.0, -2.0, 5.0, 7.0]]))
    expect_close(found, torch.tensor([[60.0, -400.0, 0.0, 0.0]]), "the result", UNITS)


def between_them_silu_decides(part: Swiglu) -> None:
    """gates near 0, for several tokens:"""
    gate, up = _random(4, 6), _random(4, 6, seed=14)
    right = gate.double() / (1 + (-gate.double()).exp()) * up.double()
    expect_close(_called(part, gate, up), right, "gate x sigmoid(gate) x up", UNITS)


def gates_keep_their_type(part: Swiglu) -> None:
    """gates in bfloat16:"""
    gate, up = _random(4, 6).bfloat16(), _random(4, 6, seed=14).bfloat16()
    found = _called(part, gate, up)
    _expect_type(found, torch.bfloat16)
    right = gate.double().sigmoid() * gate.double() * up.double()
    expect_close(found, right, "the result", UNITS, tolerance=3e-2)


CHECKS = {
    "depends_on_distance_only": (
        rotations_pass,
        other_encodings_pass,
        added_positions_fail,
        other_uses_of_the_position_fail,
    ),
    "apply_rotary": (
        at_position_0_nothing_turns,
        a_quarter_turn_swaps_a_pair,
        every_pair_and_token_has_its_own_angle,
        sixteen_bits_are_turned_in_float32,
    ),
    "rotate_first": (
        a_whole_head_is_rotated_as_before,
        a_pair_lies_within_the_rotated_part,
        the_other_numbers_stay_as_they_are,
    ),
    "unpermuted_rows": (
        one_heads_evens_come_before_its_odds,
        rows_stay_in_their_head,
        it_undoes_what_the_converter_did,
    ),
    "rms_norm": (
        a_row_is_divided_by_its_root_mean_square,
        every_row_has_its_own_size,
        the_mean_stays,
        the_weight_scales_each_number,
        eps_is_added_to_the_mean_square,
        squares_do_not_overflow_in_sixteen_bits,
    ),
    "swiglu": (
        a_gate_of_0_lets_nothing_through,
        an_open_gate_lets_gate_times_up_through,
        between_them_silu_decides,
        gates_keep_their_type,
    ),
}
