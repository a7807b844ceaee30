"""Checks of chapter 41 of a layer that one rank runs: what it returns, and what it sends."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from minigen.errors import WorkerError
from minigen.model.attention import attention
from minigen.model.layers import rms_norm, rotary_frequencies, rotary_tables, swiglu
from minigen.model.transformer import Layer, project_qkv, run_layer
from minigen.parallel.comm import Comm, SoloComm, run_ranks
from minigen.teach.checks.small_model import EPS, HEAD_DIM, HIDDEN, Product, random_layer
from minigen.teach.messages import Wrong, expect, expect_close, expect_equal
from minigen.teach.split_layer import run_split_layer

AXES = ("token", "dimension")


@dataclass
class _Written:
    """A comm that writes down what is sent through it."""

    comm: Comm
    sent: list[tuple[str, list[int]]] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def num_ranks(self) -> int:
        return self.comm.num_ranks

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._send("all_reduce", self.comm.all_reduce, x)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._send("all_gather", self.comm.all_gather, x)

    def broadcast(self, x: Tensor) -> Tensor:
        return self._send("broadcast", self.comm.broadcast, x)

    def _send(self, kind: str, operation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        self.sent.append((kind, list(x.shape)))
        return operation(x)


def _cut(product: Any, rank: int, num_ranks: int, dim: int) -> Product:
    """A rank's part of a product: of each of its parts' outputs, or of its inputs."""
    if dim == 1:
        return Product(product.matrix.chunk(num_ranks, dim=1)[rank], product.parts)
    pieces = [each.chunk(num_ranks)[rank] for each in product.matrix.split(product.parts)]
    return Product(torch.cat(pieces), tuple(len(each) for each in pieces))


def share_of(layer: Layer, rank: int, num_ranks: int) -> Layer:
    """Some of a small layer's heads, and a slice of its ffn; its norms are on every rank."""
    return replace(
        layer,
        qkv=_cut(layer.qkv, rank, num_ranks, 0),
        out=_cut(layer.out, rank, num_ranks, 1),
        gate_up=_cut(layer.gate_up, rank, num_ranks, 0),
        down=_cut(layer.down, rank, num_ranks, 1),
    )


def _inputs(num_tokens: int) -> tuple[Tensor, Any]:
    x = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(41))
    return x, rotary_tables(rotary_frequencies(HEAD_DIM, 100.0), torch.arange(num_tokens))


def _on_ranks(part: Any, num_ranks: int, num_tokens: int = 5) -> tuple[list[Any], list[_Written]]:
    """What each rank returns, and what each sends."""
    x, rotation = _inputs(num_tokens)
    everybody: dict[int, _Written] = {}

    def work(comm: Comm) -> Any:
        written = everybody[comm.rank] = _Written(comm)
        share = share_of(random_layer(), comm.rank, num_ranks)
        given = x.clone()
        found = part(share, given, rotation, attention, HEAD_DIM, EPS, written)
        expect(torch.equal(given, x), "x was changed; it must stay, so return a new tensor.")
        return found

    try:
        found = run_ranks(num_ranks, work, 2.0)
    except WorkerError as error:
        raise Wrong(f"{error} All ranks should send the same messages in the same order.") from None
    return found, [everybody[rank] for rank in range(num_ranks)]


def _whole(num_tokens: int) -> Tensor:
    x, rotation = _inputs(num_tokens)
    return run_layer(random_layer(), x, rotation, attention, HEAD_DIM, EPS)


def _messages_left_out(
    layer: Layer, x: Tensor, rotation: Any, attend: Any, head_dim: int, eps: float, comm: Comm
) -> Tensor:
    return run_split_layer(layer, x, rotation, attend, head_dim, eps, SoloComm())


def _x_summed_too(
    layer: Layer, x: Tensor, rotation: Any, attend: Any, head_dim: int, eps: float, comm: Comm
) -> Tensor:
    q, k, v = project_qkv(layer, rms_norm(x, layer.attention_norm, eps), rotation, head_dim, eps)
    x = comm.all_reduce(x + layer.out(attend(q, k, v).flatten(-2)))
    gate, up = layer.gate_up(rms_norm(x, layer.ffn_norm, eps)).chunk(2, dim=-1)
    return comm.all_reduce(x + layer.down(swiglu(gate, up)))


def _one_sum_at_the_end(
    layer: Layer, x: Tensor, rotation: Any, attend: Any, head_dim: int, eps: float, comm: Comm
) -> Tensor:
    return x + comm.all_reduce(
        run_split_layer(layer, x, rotation, attend, head_dim, eps, SoloComm()) - x
    )


MISTAKES = {
    "nothing is summed over the ranks": _messages_left_out,
    "x is summed with the rest, though all ranks have the same": _x_summed_too,
    "attention is summed only behind the feed-forward, which has read a part of it": (
        _one_sum_at_the_end
    ),
}


def alone_it_is_the_layer_of_chapter_15(part: Any) -> None:
    """one rank, which has all heads and the whole ffn:"""
    x, rotation = _inputs(4)
    found = part(random_layer(), x, rotation, attention, HEAD_DIM, EPS, SoloComm())
    expect_close(found, _whole(4), "what you return", AXES)


def every_rank_returns_what_the_whole_layer_does(part: Any) -> None:
    """two ranks:"""
    for num_tokens in (5, 1):
        right, made = _whole(num_tokens), _on_ranks(part, 2, num_tokens)[0]
        for mistake, mistaken in MISTAKES.items():
            theirs = _on_ranks(mistaken, 2, num_tokens)[0][0]
            if isinstance(made[0], Tensor) and made[0].shape == theirs.shape:
                same = made[0].allclose(theirs, atol=1e-5)
                expect(not same, f"this is what comes of it if {mistake}; that should not be.")
        for rank, found in enumerate(made):
            what = f"what rank {rank} returns for {num_tokens} tokens"
            expect_close(found, right, what, AXES)


def two_messages_of_the_size_of_x(part: Any) -> None:
    """what each rank sends:"""
    expected = [("all_reduce", [5, HIDDEN])] * 2
    for rank, written in enumerate(_on_ranks(part, 2)[1]):
        expect_equal(written.sent, expected, f"the messages of rank {rank}, with their shapes")


SPLIT_LAYER_CHECKS = (
    alone_it_is_the_layer_of_chapter_15,
    every_rank_returns_what_the_whole_layer_does,
    two_messages_of_the_size_of_x,
)
