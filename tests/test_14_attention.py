"""The fast attention, the naive one and torch's own agree, and no token sees the future."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from minigen.model.attention import attend_packed, attention, attention_naive, causal_mask

AttentionVersion = Callable[..., Tensor]

HEADS = {"multi-head": (4, 4), "grouped": (6, 2), "multi-query": (4, 1)}
# (new tokens, context): one token, prefill, decode, and a chunk in the middle of a context.
SHAPES = [(1, 1), (2, 2), (9, 9), (1, 13), (4, 11), (10, 11)]
WINDOWS = [None, 1, 3, 9, 11, 100]


def random_qkv(
    tokens: int, context: int, q_heads: int, kv_heads: int, head_dim: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(tokens, q_heads, head_dim, generator=generator),
        torch.randn(context, kv_heads, head_dim, generator=generator),
        torch.randn(context, kv_heads, head_dim, generator=generator),
    )


def mask_by_loops(num_queries: int, num_keys: int, window: int | None) -> Tensor:
    """Return the mask; query i has position num_keys - num_queries + i, and sees `window` keys."""
    rows = []
    for position in range(num_keys - num_queries, num_keys):
        distances = [position - key for key in range(num_keys)]
        rows.append([each >= 0 and (window is None or each < window) for each in distances])
    return torch.tensor(rows)


def attention_of_torch(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Compute torch's attention in float64, with repeated KV heads and an explicit mask."""
    group = q.shape[1] // k.shape[1]
    query, key, value = (
        each.double().transpose(0, 1)
        for each in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
    )
    mask = mask_by_loops(len(q), len(k), window)
    mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return mixed.transpose(0, 1).float()


def test_the_mask_equals_that_of_two_loops() -> None:
    for num_keys in range(1, 8):
        for num_queries in range(1, num_keys + 1):
            for window in (None, *range(1, 10)):
                mask = causal_mask(num_queries, num_keys, window)
                assert torch.equal(mask, mask_by_loops(num_queries, num_keys, window))


@pytest.mark.parametrize("attend", [attention, attention_naive])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("heads", HEADS)
def test_attention_is_torchs_own_with_repeated_heads(
    attend: AttentionVersion, head_dim: int, heads: str
) -> None:
    for tokens, context in SHAPES:
        q, k, v = random_qkv(tokens, context, *HEADS[heads], head_dim)
        for window in WINDOWS:
            torch.testing.assert_close(
                attend(q, k, v, window),
                attention_of_torch(q, k, v, window),
                atol=2e-6,
                rtol=1e-5,
                msg=lambda text, case=(tokens, context, window): f"{case}: {text}",
            )


@pytest.mark.parametrize("attend", [attention, attention_naive])
def test_a_long_prefill_is_right_beyond_the_block_size_of_torchs_kernel(
    attend: AttentionVersion,
) -> None:
    q, k, v = random_qkv(700, 700, 2, 1, 64)
    for window in (None, 100):
        torch.testing.assert_close(
            attend(q, k, v, window), attention_of_torch(q, k, v, window), atol=5e-6, rtol=1e-5
        )


@pytest.mark.parametrize("attend", [attention, attention_naive])
def test_a_single_token_sees_only_itself(attend: AttentionVersion) -> None:
    q, k, v = random_qkv(1, 1, 4, 2, 64)
    torch.testing.assert_close(attend(q, k, v), v.repeat_interleave(2, dim=1))
    q, k, v = random_qkv(6, 6, 4, 2, 64)
    torch.testing.assert_close(attend(q, k, v, 1), v.repeat_interleave(2, dim=1))


@pytest.mark.parametrize("attend", [attention, attention_naive])
def test_consecutive_query_heads_share_a_key_value_head(attend: AttentionVersion) -> None:
    q, k, v = random_qkv(5, 5, 6, 3, 64)
    changed = v.clone()
    changed[:, 1] += 1
    difference = (attend(q, k, changed) - attend(q, k, v)).abs().amax(dim=(0, 2))
    assert (difference > 0.5).tolist() == [False, False, True, True, False, False]


@pytest.mark.parametrize("attend", [attention, attention_naive])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_softmax_is_stable_at_large_scores(
    attend: AttentionVersion, shape: tuple[int, int]
) -> None:
    q, k, v = random_qkv(*shape, 4, 2, 64)
    q, k = 100 * q, 100 * k  # scores of about 1e4: exp of one is infinite
    assert (torch.einsum("qhd,khd->hqk", q[:, :2], k) / 8).abs().max() > 1e4
    mixed = attend(q, k, v)
    assert mixed.isfinite().all()
    torch.testing.assert_close(mixed, attention_of_torch(q, k, v, None), atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("attend", [attention, attention_naive])
def test_bfloat16_stays_bfloat16_and_close_to_float32(attend: AttentionVersion) -> None:
    for shape in SHAPES:
        q, k, v = (each.bfloat16() for each in random_qkv(*shape, 6, 2, 80))
        mixed = attend(q, k, v, 3)
        assert mixed.dtype == torch.bfloat16
        torch.testing.assert_close(
            mixed.float(), attention_of_torch(q, k, v, 3), atol=2e-2, rtol=2e-2
        )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("attend", [attention, attention_naive])
def test_changing_later_tokens_never_changes_earlier_outputs(
    attend: AttentionVersion, data: st.DataObject
) -> None:
    kv_heads = data.draw(st.integers(1, 3))
    q_heads = kv_heads * data.draw(st.integers(1, 3))
    head_dim = 2 * data.draw(st.integers(1, 40))
    context = data.draw(st.integers(2, 24))
    tokens = data.draw(st.integers(2, context))
    window = data.draw(st.none() | st.integers(1, 30))
    changed_at = data.draw(st.integers(context - tokens + 1, context - 1))
    q, k, v = random_qkv(tokens, context, q_heads, kv_heads, head_dim)
    before = attend(q, k, v, window)
    first_changed = changed_at - (context - tokens)
    q[first_changed:], k[changed_at:], v[changed_at:] = 7.0, -3.0, 1e6
    after = attend(q, k, v, window)
    assert torch.equal(after[:first_changed], before[:first_changed])
    assert (after[first_changed:] != before[first_changed:]).any(dim=-1).all()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("attend", [attention, attention_naive])
def test_tokens_before_the_window_are_never_read(
    attend: AttentionVersion, data: st.DataObject
) -> None:
    context = data.draw(st.integers(2, 24))
    tokens = data.draw(st.integers(1, context))
    window = data.draw(st.integers(1, context))
    q, k, v = random_qkv(tokens, context, 4, 2, 16)
    before = attend(q, k, v, window)
    row = data.draw(st.integers(0, tokens - 1))
    oldest_seen = max(0, context - tokens + row - window + 1)
    k[:oldest_seen], v[:oldest_seen] = 5.0, 1e6
    assert torch.equal(attend(q, k, v, window)[row], before[row])
    k[oldest_seen], v[oldest_seen] = 5.0, 1e6
    assert not torch.equal(attend(q, k, v, window)[row], before[row])


def test_packed_sequences_are_each_as_if_alone() -> None:
    lengths, windows = [5, 1, 12, 3], [None, 4]
    attend = attend_packed(lengths, windows)
    q, k, v = random_qkv(sum(lengths), sum(lengths), 4, 2, 64)
    for layer_id, window in enumerate(windows):
        mixed = attend(layer_id, q, k, v)
        parts = zip(*(each.split(lengths) for each in (mixed, q, k, v)), strict=True)
        for mine, q_own, k_own, v_own in parts:
            expected = attention_of_torch(q_own, k_own, v_own, window)
            torch.testing.assert_close(mine, expected, atol=2e-6, rtol=1e-5)


def test_packed_sequences_do_not_see_a_neighbour_change() -> None:
    lengths = [5, 4, 6]
    attend = attend_packed(lengths, [None])
    q, k, v = random_qkv(15, 15, 4, 2, 64)
    before = attend(0, q, k, v)
    q[5:9], k[5:9], v[5:9] = 2.0, 9.0, math.inf
    after = attend(0, q, k, v)
    assert torch.equal(after[:5], before[:5])
    assert torch.equal(after[9:], before[9:])
    assert not after[5:9].isfinite().any()
