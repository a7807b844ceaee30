"""Checks of chapter 14: who may look at whom, and what comes of it, in cases done by hand."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from minigen.model.attention import attention, causal_mask
from minigen_course.grading.exercise import Exercise
from minigen_course.grading.messages import expect, expect_close, expect_equal

Mask = Callable[..., Tensor]
Attention = Callable[..., Tensor]

HEADS = ("token", "head", "number")


def _mask(part: Mask, *given: int, **named: int) -> list[list[int]]:
    found = part(*given, **named)
    expect(isinstance(found, Tensor), f"returned {type(found).__name__}; return a tensor.")
    expect_equal(str(found.dtype), "torch.bool", "the type of the mask")
    expect_equal(list(found.shape), list(given[:2]), "the shape of the mask (queries, keys)")
    rows: list[list[int]] = found.int().tolist()
    return rows


def _expect_mask(found: list[list[int]], right: list[list[int]]) -> None:
    first = len(right[0]) - len(right)
    for row, (mine, due) in enumerate(zip(found, right, strict=True)):
        expect_equal(mine, due, f"the query at position {first + row}: which keys it sees")


def a_prompts_mask_is_a_triangle(part: Mask) -> None:
    """three queries and their own three keys:"""
    _expect_mask(_mask(part, 3, 3), [[1, 0, 0], [1, 1, 0], [1, 1, 1]])


def queries_are_the_last_positions(part: Mask) -> None:
    """two new queries behind three older keys, and one alone:"""
    _expect_mask(_mask(part, 2, 5), [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    _expect_mask(_mask(part, 1, 4), [[1, 1, 1, 1]])


def a_window_counts_the_token_itself(part: Mask) -> None:
    """a window of 2 positions, and one of 1:"""
    _expect_mask(
        _mask(part, 4, 4, window=2), [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    )
    _expect_mask(_mask(part, 2, 2, window=1), [[1, 0], [0, 1]])


def a_window_moves_with_the_positions(part: Mask) -> None:
    """two new queries behind three older keys, with a window of 3, and a window wider than all:"""
    _expect_mask(_mask(part, 2, 5, window=3), [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]])
    _expect_mask(_mask(part, 2, 3, window=9), [[1, 1, 0], [1, 1, 1]])


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _attended(part: Attention, q: Tensor, k: Tensor, v: Tensor, *window: int | None) -> Tensor:
    before = [each.clone() for each in (q, k, v)]
    found = part(q, k, v, *window)
    expect(isinstance(found, Tensor), f"returned {type(found).__name__}; return a tensor.")
    for name, now, then in zip("qkv", (q, k, v), before, strict=True):
        expect(torch.equal(now, then), f"changed {name}, which it was given; return a new tensor.")
    return found


def _reference(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """One query and one head at a time, in float64."""
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
    """one token, which can look at nothing but itself:"""
    q, k, v = _random(1, 2, 4, seed=1), _random(1, 2, 4, seed=2), _random(1, 2, 4, seed=3)
    expect_close(_attended(part, q, k, v), v, "what it takes", HEADS)


def without_a_preference_values_are_averaged(part: Attention) -> None:
    """queries of zeros, which like all keys that they may see:"""
    v = torch.tensor([1.0, 2.0, 6.0]).reshape(3, 1, 1).expand(3, 1, 2).contiguous()
    found = _attended(part, torch.zeros(3, 1, 2), torch.ones(3, 1, 2), v)
    right = torch.tensor([1.0, 1.5, 3.0]).reshape(3, 1, 1).expand(3, 1, 2)
    expect_close(found, right, "the mean of the values so far", HEADS)


def scores_are_divided_by_the_root_of_head_dim(part: Attention) -> None:
    """two keys, of scores 0 and ln 3 after the division, so of weights 1/4 and 3/4:"""
    q = torch.tensor([[[2.0, 0.0, 0.0, 0.0]]])
    k = torch.tensor([[[0.0, 0.0, 0.0, 0.0]], [[math.log(3), 0.0, 0.0, 0.0]]])
    v = torch.tensor([[[0.0, 0.0, 0.0, 4.0]], [[4.0, 0.0, 0.0, 0.0]]])
    right = torch.tensor([[[3.0, 0.0, 0.0, 1.0]]])
    expect_close(_attended(part, q, k, v), right, "the mixed values", HEADS)


def neighbouring_query_heads_share_a_kv_head(part: Attention) -> None:
    """six query heads over three KV heads, whose values are 0, 1 and 2:"""
    v = torch.arange(3.0).reshape(1, 3, 1).expand(2, 3, 4).contiguous()
    q, k = _random(2, 6, 4, seed=1), _random(2, 3, 4, seed=2)
    found = _attended(part, q, k, v)
    expect_equal(list(found.shape), [2, 6, 4], "the shape of what you return")
    shared = [round(each) for each in found[1, :, 0].tolist()]
    expect_equal(shared, [0, 0, 1, 1, 2, 2], "the KV head that each query head should look through")


def _case(tokens: int, context: int) -> tuple[Tensor, Tensor, Tensor]:
    """Four query heads over two KV heads of eight numbers."""
    k, v = _random(context, 2, 8, seed=5), _random(context, 2, 8, seed=6)
    return _random(tokens, 4, 8, seed=4), k, v


SIZES = ((7, 7), (3, 7), (2, 7), (1, 7), (2, 2))


def prompts_pieces_and_single_tokens_agree_with_the_formula(part: Attention) -> None:
    """a whole prompt, its last tokens, and one token behind its context:"""
    for tokens, context in SIZES:
        case = _case(tokens, context)
        what = f"{tokens} new tokens of {context}"
        expect_close(_attended(part, *case), _reference(*case, None), what, HEADS)


def no_token_sees_beyond_its_window(part: Attention) -> None:
    """windows of 1 to 8 positions:"""
    for tokens, context in SIZES:
        case = _case(tokens, context)
        for window in (3, 1, 2, 6, 7, 8):
            what = f"{tokens} new tokens of {context} with a window of {window}"
            right = _reference(*case, window)
            expect_close(_attended(part, *case, window), right, what, HEADS)


def large_scores_do_not_overflow(part: Attention) -> None:
    """scores of some thousands, of which exp is infinite:"""
    q, k, v = _random(4, 2, 8, seed=7), _random(4, 2, 8, seed=8), _random(4, 2, 8, seed=9)
    found = _attended(part, 100 * q, 100 * k, v)
    message = "has nan or infinity; the largest score of a row should be subtracted before exp."
    expect(bool(found.isfinite().all()), message)
    right = _reference(100 * q, 100 * k, v, None)
    expect_close(found, right, "the mixed values", HEADS, tolerance=1e-2)


def sixteen_bits_stay_sixteen_bits(part: Attention) -> None:
    """queries, keys and values in bfloat16:"""
    q, k, v = (each.bfloat16() for each in _case(5, 5))
    found = _attended(part, q, k, v)
    expect_equal(str(found.dtype), "torch.bfloat16", "the type of what you return")
    expect_close(found, _reference(q, k, v, None), "the mixed values", HEADS, tolerance=5e-2)


EXERCISES = (
    Exercise(
        "causal_mask",
        causal_mask,
        (
            a_prompts_mask_is_a_triangle,
            queries_are_the_last_positions,
            a_window_counts_the_token_itself,
            a_window_moves_with_the_positions,
        ),
        (
            "Give every query and every key its position in the text, and compare positions.",
            "The queries' positions are num_keys - num_queries and on. A key is seen if its "
            "position is not larger than the query's, and larger than the query's minus window.",
            "torch.arange(...)[:, None] against torch.arange(...) compares each with each.",
        ),
        "Write the causal mask: True where a query may look at a key. The queries are the last "
        "positions of the keys; a query sees itself and what came before it, at most `window` "
        "positions in all if there is a window.",
        """from minigen import SamplingParams
from minigen_course import load_model

llm = load_model(enable_prefix_caching=False, max_num_batched_tokens=16)  # longer prompts go in pieces
prompt = "The old lighthouse keeper lost his lamp, so the young sailor gave him a lamp. The keeper"
with using(14, causal_mask=mine):
    print(llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24)).text)""",
        "A mask for two texts packed one behind the other, of which neither may see the other.",
    ),
    Exercise(
        "attention",
        attention,
        (
            a_lone_token_takes_its_own_value,
            without_a_preference_values_are_averaged,
            scores_are_divided_by_the_root_of_head_dim,
            neighbouring_query_heads_share_a_kv_head,
            prompts_pieces_and_single_tokens_agree_with_the_formula,
            no_token_sees_beyond_its_window,
            large_scores_do_not_overflow,
            sixteen_bits_stay_sixteen_bits,
        ),
        (
            "First K and V with as many heads as Q: repeat_interleave, not repeat. Then scores of "
            "shape (heads, queries, keys).",
            'torch.einsum("qhd,khd->hqk", q, k) makes the scores, and "hqk,khd->qhd" mixes; '
            "between them division, mask, softmax.",
            "masked_fill(~causal_mask(len(q), len(k), window), -math.inf), then softmax(-1), which "
            "subtracts the maximum itself; compute in float32, and return q's type.",
        ),
        "Write causal attention: softmax(q k^T / sqrt(head_dim)) v for every head, where query "
        "head h looks through KV head h // (q_heads / kv_heads). The queries are the last "
        "`tokens` positions of the context, and see at most `window` positions if there is a "
        "window.",
        """from minigen import SamplingParams
from minigen_course import load_model

llm = load_model(enable_prefix_caching=False)
with using(14, attention=mine):
    print(llm.generate("The old lighthouse", SamplingParams(temperature=0, max_tokens=24)).text)""",
        "Without repeating K and V, and with the keys taken in tiles of 16, so that no row of "
        "scores is ever there as a whole. Which two numbers must be carried from tile to tile?",
    ),
)
