"""A model so small that a check runs it in a millisecond; its random weights never change."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minigen.model.attention import attend_packed
from minigen.model.layers import DenseLinear, rotary_frequencies
from minigen.model.transformer import Layer, Transformer
from minigen.protocols import Attend

HIDDEN, Q_HEADS, KV_HEADS, HEAD_DIM, FFN = 12, 4, 2, 6, 20
EPS = 0.05  # large, so that a wrong one is noticed
VOCAB = 29


@dataclass(frozen=True)
class Product:
    """A linear layer that has only a call and its `parts`, like a packed one."""

    matrix: Tensor
    parts: tuple[int, ...]

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.matrix.T


def random_layer(head_norms: bool = False) -> Layer:
    """Return a small layer of random weights, the same every time."""
    generator = torch.Generator().manual_seed(15)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def product(*parts: int, width: int = HIDDEN) -> Product:
        return Product(drawn(sum(parts), width) / width**0.5, parts)

    q_width, kv_width = Q_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    return Layer(
        attention_norm=drawn(HIDDEN).abs() + 0.5,
        qkv=product(q_width, kv_width, kv_width),
        q_norm=drawn(HEAD_DIM).abs() + 0.5 if head_norms else None,
        k_norm=drawn(HEAD_DIM).abs() + 0.5 if head_norms else None,
        out=product(HIDDEN, width=q_width),
        ffn_norm=drawn(HIDDEN).abs() + 0.5,
        gate_up=product(FFN, FFN),
        down=product(HIDDEN, width=FFN),
    )


@dataclass(frozen=True)
class RecordingModel(Transformer):
    """A small model that records the tokens that it computes, and their positions."""

    windows: Sequence[int | None]
    steps: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        self.steps.append((token_ids.tolist(), positions.tolist()))
        return Transformer.__call__(self, token_ids, positions, attend)

    def whole(self, ids: list[int]) -> Tensor:
        """Return the logits after a text, computed in one pass."""
        attend = attend_packed([len(ids)], self.windows)
        hidden = Transformer.__call__(self, torch.tensor(ids), torch.arange(len(ids)), attend)
        return self.logits(hidden[-1:])[0]


def recording_model(windows: Sequence[int | None]) -> RecordingModel:
    """Return a model with one layer per window."""
    embedding, head = torch.randn(2, VOCAB, HIDDEN, generator=torch.Generator().manual_seed(17))
    return RecordingModel(
        embedding=embedding,
        layers=tuple(random_layer() for _ in windows),
        norm=torch.ones(HIDDEN),
        head=DenseLinear(head, None, (VOCAB,)),
        frequencies=rotary_frequencies(HEAD_DIM, 100.0),
        head_dim=HEAD_DIM,
        norm_eps=EPS,
        windows=windows,
    )
