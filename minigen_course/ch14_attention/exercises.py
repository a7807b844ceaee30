"""Checks of chapter 14: the causal mask, and attention, on cases computed by hand."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from minigen_course.grading.exercise import expect, expect_close, expect_equal

CausalMask = Callable[..., Tensor]
Attention = Callable[..., Tensor]

AXES = ("token", "head", "dimension")


def _mask(part: CausalMask, *given: int, **named: int) -> list[list[int]]:
    """Return the part's mask as rows of 0 and 1; expect a bool tensor of the right shape."""
    found = part(*given, **named)
    expect(isinstance(found, Tensor), f"returned {type(found).__name__}; return a tensor.")
    expect_equal(str(found.dtype), "torch.bool", "the dtype of the mask")
    expect_equal(list(found.shape), list(given[:2]), "the shape of the mask (queries, keys)")
    rows: list[list[int]] = found.int().tolist()
    return rows


def _expect_mask(found: list[list[int]], right: list[list[int]]) -> None:
    first_position = len(right[0]) - len(right)
    for position, (mine, expected) in enumerate(zip(found, right, strict=True), first_position):
        expect_equal(mine, expected, f"the keys that the query at position {position} sees")


def a_prompts_mask_is_a_triangle(part: CausalMask) -> None:
    """three queries and their own three keys:"""
    _expect_mask(_mask(part, 3, 3), [[1, 0, 0], [1, 1, 0], [1, 1, 1]])


def queries_are_the_last_positions(part: CausalMask) -> None:
    """two new queries after three older keys, and a single new query:"""
    _expect_mask(_mask(part, 2, 5), [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    _expect_mask(_mask(part, 1, 4), [[1, 1, 1, 1]])


def a_window_counts_the_token_itself(part: CausalMask) -> None:
    """a window of 2 positions, and one of 1:"""
    _expect_mask(
        _mask(part, 4, 4, window=2), [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    )
    _expect_mask(_mask(part, 2, 2, window=1), [[1, 0], [0, 1]])


def a_window_moves_with_the_positions(part: CausalMask) -> None:
    """two new queries with a window of 3, and two with a window wider than the context:"""
    _expect_mask(_mask(part, 2, 5, window=3), [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]])
    _expect_mask(_mask(part, 2, 3, window=9), [[1, 1, 0], [1, 1, 1]])


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _attended(part: Attention, q: Tensor, k: Tensor, v: Tensor, *window: int | None) -> Tensor:
    """Return the part's result; expect a tensor and unchanged arguments."""
    before = [each.clone() for each in (q, k, v)]
    found = part(q, k, v, *window)
    expect(isinstance(found, Tensor), f"returned {type(found).__name__}; return a tensor.")
    for name, now, then in zip("qkv", (q, k, v), before, strict=True):
        expect(torch.equal(now, then), f"changed its argument {name}; return a new tensor.")
    return found


def _reference(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Return the right result in float64, computed one query and one head at a time."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for token in range(len(q)):
        position = len(k) - len(q) + token
        begin = 0 if window is None else max(0, position - window + 1)
        for head in range(q.shape[1]):
            kv_head = head * k.shape[1] // q.shape[1]
            keys = k[begin : position + 1, kv_head].double()
            weights = (keys @ q[token, head].double() / math.sqrt(q.shape[2])).softmax(0)
            out[token, head] = weights @ v[begin : position + 1, kv_head].double()
    return out


def a_lone_token_takes_its_own_value(part: Attention) -> None:
    """one token, which can attend only to itself:"""
    q, k, v = _random(1, 2, 4, seed=1), _random(1, 2, 4, seed=2), _random(1, 2, 4, seed=3)
    expect_close(_attended(part, q, k, v), v, "the result", AXES)


def without_a_preference_values_are_averaged(part: Attention) -> None:
    """queries of zeros, which weigh all visible keys equally:"""
    v = torch.tensor([1.0, 2.0, 6.0]).reshape(3, 1, 1).expand(3, 1, 2).contiguous()
    found = _attended(part, torch.zeros(3, 1, 2), torch.ones(3, 1, 2), v)
    right = torch.tensor([1.0, 1.5, 3.0]).reshape(3, 1, 1).expand(3, 1, 2)
    expect_close(found, right, "the mean of the values so far", AXES)


def scores_are_divided_by_the_root_of_head_dim(part: Attention) -> None:
    """two keys with scores 0 and ln 3 after the division, so with weights 1/4 and 3/4:"""
    q = torch.tensor([[[2.0, 0.0, 0.0, 0.0]]])
    k = torch.tensor([[[0.0, 0.0, 0.0, 0.0]], [[math.log(3), 0.0, 0.0, 0.0]]])
    v = torch.tensor([[[0.0, 0.0, 0.0, 4.0]], [[4.0, 0.0, 0.0, 0.0]]])
    right = torch.tensor([[[3.0, 0.0, 0.0, 1.0]]])
    expect_close(_attended(part, q, k, v), right, "the result", AXES)


def neighbouring_query_heads_share_a_kv_head(part: Attention) -> None:
    """six query heads over three KV heads, whose values are 0, 1 and 2:"""
    v = torch.arange(3.0).reshape(1, 3, 1).expand(2, 3, 4).contiguous()
    q, k = _random(2, 6, 4, seed=1), _random(2, 3, 4, seed=2)
    found = _attended(part, q, k, v)
    expect_equal(list(found.shape), [2, 6, 4], "the shape of the result")
    shared = [round(each) for each in found[1, :, 0].tolist()]
    expect_equal(shared, [0, 0, 1, 1, 2, 2], "the KV head that each query head should use")


def _case(tokens: int, context: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random q, k and v with four query heads, two KV heads and a head_dim of 8."""
    k, v = _random(context, 2, 8, seed=5), _random(context, 2, 8, seed=6)
    return _random(tokens, 4, 8, seed=4), k, v


SIZES = ((7, 7), (3, 7), (2, 7), (1, 7), (2, 2))


def prompts_chunks_and_single_tokens_agree_with_the_formula(part: Attention) -> None:
    """a whole prompt, a chunk after its context, and one token after its context:"""
    for tokens, context in SIZES:
        case = _case(tokens, context)
        what = f"{tokens} new tokens in a context of {context}"
        expect_close(_attended(part, *case), _reference(*case, None), what, AXES)


def no_token_sees_beyond_its_window(part: Attention) -> None:
    """windows of 1 to 8 positions:"""
    for tokens, context in SIZES:
        case = _case(tokens, context)
        for window in (3, 1, 2, 6, 7, 8):
            what = f"{tokens} new tokens in a context of {context}, window {window}"
            right = _reference(*case, window)
            expect_close(_attended(part, *case, window), right, what, AXES)


def large_scores_do_not_overflow(part: Attention) -> None:
    """scores of several thousand, whose exp is infinite:"""
    q, k, v = _random(4, 2, 8, seed=7), _random(4, 2, 8, seed=8), _random(4, 2, 8, seed=9)
    found = _attended(part, 100 * q, 100 * k, v)
    message = "the result has nan or infinity; each row's largest score should be subtracted first."
    expect(bool(found.isfinite().all()), message)
    right = _reference(100 * q, 100 * k, v, None)
    expect_close(found, right, "the result", AXES, tolerance=1e-2)


def bfloat16_stays_bfloat16(part: Attention) -> None:
    """queries, keys and values in bfloat16:"""
    q, k, v = (each.bfloat16() for each in _case(5, 5))
    found = _attended(part, q, k, v)
    expect_equal(str(found.dtype), "torch.bfloat16", "the dtype of the result")
    expect_close(found, _reference(q, k, v, None), "the result", AXES, tolerance=5e-2)


CHECKS = {
    "causal_mask": (
        a_prompts_mask_is_a_triangle,
        queries_are_the_last_positions,
        a_window_counts_the_token_itself,
        a_window_moves_with_the_positions,
    ),
    "attention": (
        a_lone_token_takes_its_own_value,
        without_a_preference_values_are_averaged,
        scores_are_divided_by_the_root_of_head_dim,
        neighbouring_query_heads_share_a_kv_head,
        prompts_chunks_and_single_tokens_agree_with_the_formula,
        no_token_sees_beyond_its_window,
        large_scores_do_not_overflow,
        bfloat16_stays_bfloat16,
    ),
}
