"""What chapter 14 tries beside the package: wrong versions of attention, weights by length."""

import torch
from torch import Tensor

from minigen.model.attention import attention
from minigen_course.ch14_attention.lesson import alone, by_length, unmasked


def some_heads() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 6, 8, generator=generator)
    k, v = torch.randn(2, 5, 2, 8, generator=generator)
    return q, k, v


def test_alone_is_attention_to_oneself() -> None:
    q, k, v = some_heads()
    torch.testing.assert_close(alone(q, k, v), attention(q, k, v, 1))


def test_unmasked_lets_every_query_see_what_the_last_one_may() -> None:
    q, k, v = some_heads()
    found = unmasked(q, k, v)
    for token in range(len(q)):
        torch.testing.assert_close(found[token : token + 1], attention(q[token : token + 1], k, v))
    torch.testing.assert_close(found[-1], attention(q, k, v)[-1])
    assert not torch.allclose(found[:-1], attention(q, k, v)[:-1], atol=0.01)


def test_weights_are_multiplied_by_the_lengths_of_their_own_heads_values() -> None:
    weights = torch.ones(1, 4, 3, 2)
    lengths = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])  # two keys, two KV heads
    found = by_length(weights, lengths)
    assert found[0, :, 0].tolist() == [[1, 3], [1, 3], [2, 4], [2, 4]]
    assert torch.equal(found, found[:, :, :1].expand_as(found))
