"""Checks of chapter 13: RMSNorm, the rotary embedding and SwiGLU, each on a few numbers."""

from collections.abc import Callable

import torch
from torch import Tensor

from minigen.model.layers import apply_rotary_interleaved
from minigen_course.grading.exercise import expect, expect_close, expect_equal

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
    "rms_norm": (
        a_row_is_divided_by_its_root_mean_square,
        every_row_has_its_own_size,
        the_mean_stays,
        the_weight_scales_each_number,
        eps_is_added_to_the_mean_square,
        squares_do_not_overflow_in_sixteen_bits,
    ),
    "apply_rotary": (
        at_position_0_nothing_turns,
        a_quarter_turn_swaps_a_pair,
        every_pair_and_token_has_its_own_angle,
        sixteen_bits_are_turned_in_float32,
    ),
    "swiglu": (
        a_gate_of_0_lets_nothing_through,
        an_open_gate_lets_gate_times_up_through,
        between_them_silu_decides,
        gates_keep_their_type,
    ),
}
