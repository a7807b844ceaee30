"""Rings: merged partial attentions equal attention at once, and shares of a causal prompt."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from minigen_course.ch42_pipeline import lesson
from minigen_course.ch42_pipeline.reference import merge_parts, zig_zag

Share = Callable[[int, int, int], list[int]]


def tensors(num_tokens: int, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(num_tokens, 3, 8, generator=generator) for _ in range(3)]


def torchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    first, keys, values = (each.transpose(0, 1)[None] for each in (q, k, v))
    mixed = functional.scaled_dot_product_attention(first, keys, values, is_causal=True)
    return mixed[0].transpose(0, 1)


def test_attention_over_all_keys_is_torchs() -> None:
    q, k, v = tensors(13)
    found, lse = lesson.attend_part(q, k, v, range(13), range(13))
    torch.testing.assert_close(found, torchs(q, k, v))
    assert lse.shape == (13, 3)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("num_tokens", [1, 5, 16])
@pytest.mark.parametrize("share", [zig_zag, lesson.plain_part])
def test_a_ring_of_ranks_is_torchs_attention(num_ranks: int, num_tokens: int, share: Share) -> None:
    q, k, v = tensors(num_tokens, num_tokens)
    positions = [share(num_tokens, rank, num_ranks) for rank in range(num_ranks)]
    if not all(positions):
        return  # a rank without tokens has nothing to send
    found = lesson.ring_attention(q, k, v, positions, merge_parts)
    torch.testing.assert_close(found, torchs(q, k, v))


def test_a_split_cache_merges_to_the_whole_one_in_any_order() -> None:
    q, k, v = tensors(24)
    last = q[-1:]
    right, lse = lesson.attend_part(last, k, v, [23], range(24))
    parts = [
        lesson.attend_part(last, k[i : i + 6], v[i : i + 6], [23], range(i, i + 6))
        for i in range(0, 24, 6)
    ]
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        found = parts[order[0]]
        for each in order[1:]:
            found = merge_parts(*found, *parts[each])
        torch.testing.assert_close(found[0], right)
        torch.testing.assert_close(found[1], lse)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_all_pairs_of_a_causal_prompt_are_computed_once(num_ranks: int) -> None:
    for share in (zig_zag, lesson.plain_part):
        positions = [share(37, rank, num_ranks) for rank in range(num_ranks)]
        assert sorted(each for own in positions for each in own) == list(range(37))
        assert sum(map(sum, lesson.ring_pairs(positions))) == 37 * 38 // 2


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_plain_ring_takes_2_less_1_nth_times_as_long(num_ranks: int) -> None:
    tokens = 512 * num_ranks
    plain = [lesson.plain_part(tokens, rank, num_ranks) for rank in range(num_ranks)]
    assert lesson.ring_slowdown(plain) == pytest.approx(2 - 1 / num_ranks, abs=0.01)
    even = [zig_zag(tokens, rank, num_ranks) for rank in range(num_ranks)]
    assert lesson.ring_slowdown(even) == pytest.approx(1.0, abs=0.01)
