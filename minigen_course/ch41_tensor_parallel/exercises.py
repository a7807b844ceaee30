"""Chapter 41's exercises: shard the tensors, and run a split layer with its messages."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from minigen.checkpoint.model_config import ModelConfig
from minigen.checkpoint.safetensors import StoredTensor
from minigen.errors import WorkerError
from minigen.model.attention import attention
from minigen.model.layers import rms_norm, rotary_frequencies, rotary_tables, swiglu
from minigen.model.transformer import Layer, project_qkv, run_layer
from minigen.parallel.comm import Comm, SoloComm, run_ranks
from minigen_course.ch41_tensor_parallel.lesson import run_split_layer
from minigen_course.grading.exercise import Wrong, expect, expect_close, expect_equal
from minigen_course.lab.small_model import (
    EPS,
    FFN,
    HEAD_DIM,
    HIDDEN,
    KV_HEADS,
    Q_HEADS,
    VOCAB,
    Product,
    random_layer,
)

AXES = ("token", "dimension")


@dataclass
class _RecordedComm:
    """A comm that records what is sent through it."""

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
    """Return a rank's shard of a product: split by the outputs of each part, or by inputs."""
    if dim == 1:
        return Product(product.matrix.chunk(num_ranks, dim=1)[rank], product.parts)
    pieces = [each.chunk(num_ranks)[rank] for each in product.matrix.split(product.parts)]
    return Product(torch.cat(pieces), tuple(len(each) for each in pieces))


def shard_of(layer: Layer, rank: int, num_ranks: int) -> Layer:
    """Return a rank's heads of a small layer, and its slice of the ffn; norms are on every rank."""
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


def _on_ranks(
    part: Any, num_ranks: int, num_tokens: int = 5
) -> tuple[list[Any], list[_RecordedComm]]:
    """Run the part on ranks; return what each rank returned, and what each sent."""
    x, rotation = _inputs(num_tokens)
    comms: dict[int, _RecordedComm] = {}

    def work(comm: Comm) -> Any:
        recorded = comms[comm.rank] = _RecordedComm(comm)
        shard = shard_of(random_layer(), comm.rank, num_ranks)
        given = x.clone()
        found = part(shard, given, rotation, attention, HEAD_DIM, EPS, recorded)
        expect(torch.equal(given, x), "x was changed in place; return a new tensor instead.")
        return found

    try:
        found = run_ranks(num_ranks, work, 2.0)
    except WorkerError as error:
        raise Wrong(f"{error} All ranks should send the same messages in the same order.") from None
    return found, [comms[rank] for rank in range(num_ranks)]


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
    "x is included in the sum, though all ranks have the same x": _x_summed_too,
    "attention is summed only after the feed-forward, which has read a partial sum": (
        _one_sum_at_the_end
    ),
}


def one_rank_runs_the_layer_of_chapter_15(part: Any) -> None:
    """a single rank, which has all heads and the whole ffn:"""
    x, rotation = _inputs(4)
    found = part(random_layer(), x, rotation, attention, HEAD_DIM, EPS, SoloComm())
    expect_close(found, _whole(4), "the result", AXES)


def every_rank_returns_the_result_of_the_whole_layer(part: Any) -> None:
    """two ranks:"""
    for num_tokens in (5, 1):
        right, made = _whole(num_tokens), _on_ranks(part, 2, num_tokens)[0]
        for mistake, mistaken in MISTAKES.items():
            theirs = _on_ranks(mistaken, 2, num_tokens)[0][0]
            if isinstance(made[0], Tensor) and made[0].shape == theirs.shape:
                same = made[0].allclose(theirs, atol=1e-5)
                expect(not same, f"this is the result if {mistake}; that should not be.")
        for rank, found in enumerate(made):
            what = f"the result of rank {rank} for {num_tokens} tokens"
            expect_close(found, right, what, AXES)


def each_rank_sends_two_messages_of_the_size_of_x(part: Any) -> None:
    """the messages that each of two ranks sends:"""
    expected = [("all_reduce", [5, HIDDEN])] * 2
    for rank, recorded in enumerate(_on_ranks(part, 2)[1]):
        expect_equal(recorded.sent, expected, f"the messages of rank {rank}, with their shapes")


SPLIT_LAYER_CHECKS = (
    one_rank_runs_the_layer_of_chapter_15,
    every_rank_returns_the_result_of_the_whole_layer,
    each_rank_sends_two_messages_of_the_size_of_x,
)


CONFIG = ModelConfig(
    "llama", VOCAB, HIDDEN, 2, Q_HEADS, KV_HEADS, HEAD_DIM, FFN, 128, 1e-5, 1e4, 1.0, None,
    False, True, True, True, False, (None,) * 2, None, (),
)  # fmt: skip
HEADS, KV, UNITS = Q_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, FFN
# The matrices of a layer, as checkpoints store them: [outputs, inputs].
SHAPES = {
    "self_attn.q_proj": (HEADS, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS),
    "mlp.gate_proj": (UNITS, HIDDEN),
    "mlp.up_proj": (UNITS, HIDDEN),
    "mlp.down_proj": (HIDDEN, UNITS),
}
SUMMED = ("self_attn.o_proj", "mlp.down_proj")


def _stored(name: str, numbers: Tensor) -> StoredTensor:
    data = numbers.reshape(len(numbers) if numbers.dim() == 2 else 1, -1).contiguous()
    return StoredTensor(name, "F32", tuple(numbers.shape), data.view(torch.uint8))


def _checkpoint() -> dict[str, StoredTensor]:
    """Make a checkpoint in which every element has a different value."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    shapes |= {"lm_head.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer_id in range(2):
        prefix = f"model.layers.{layer_id}."
        shapes[f"{prefix}input_layernorm.weight"] = (HIDDEN,)
        for module, sizes in SHAPES.items():
            shapes[f"{prefix}{module}.weight"] = sizes
            shapes[f"{prefix}{module}.bias"] = sizes[:1]
    stored: dict[str, StoredTensor] = {}
    first = 0
    for name, shape in shapes.items():
        count = int(torch.tensor(shape).prod())
        numbers = torch.arange(first, first + count, dtype=torch.float32).reshape(shape)
        stored[name], first = _stored(name, numbers), first + count
    return stored


def _shares(part: Any, num_ranks: int) -> list[dict[str, StoredTensor]]:
    """Return each rank's tensors; raise `Wrong` for anything but dictionaries of `StoredTensor`."""
    tensors = _checkpoint()
    before, found = set(tensors), list[dict[str, StoredTensor]]()
    for rank in range(num_ranks):
        share = part(tensors, CONFIG, rank, num_ranks)
        expect(isinstance(share, dict), f"returned {type(share).__name__}; return a dictionary.")
        expect(set(tensors) == before, "the given dictionary was changed; it must stay as it was.")
        for name, each in share.items():
            what = f"{name} of rank {rank}"
            expect(
                isinstance(each, StoredTensor),
                f"{what} is a {type(each).__name__}; it should be a StoredTensor, cut by rows() or "
                "columns().",
            )
        found.append(share)
    return found


def _expect_share(
    shares: list[dict[str, StoredTensor]], rank: int, name: str, right: Tensor
) -> None:
    what = f"{name} of rank {rank} of {len(shares)}"
    expect(name in shares[rank], f"{what} is missing; it should be there.")
    axes = ("row", "column") if right.dim() == 2 else ("element",)
    expect_close(shares[rank][name].dequantize(), right, what, axes)


def a_single_rank_has_everything(part: Any) -> None:
    """a single rank:"""
    tensors, shares = _checkpoint(), _shares(part, 1)
    for name, tensor in tensors.items():
        _expect_share(shares, 0, name, tensor.dequantize())


def a_column_split_cuts_stored_rows(part: Any) -> None:
    """two ranks, matrices that are split by their outputs:"""
    tensors, shares = _checkpoint(), _shares(part, 2)
    for module in (each for each in SHAPES if each not in SUMMED):
        for name in (f"model.layers.1.{module}.weight", f"model.layers.1.{module}.bias"):
            for rank, right in enumerate(tensors[name].dequantize().chunk(2)):
                _expect_share(shares, rank, name, right)


def a_row_split_cuts_stored_columns(part: Any) -> None:
    """two ranks, matrices that are split by their inputs:"""
    tensors, shares = _checkpoint(), _shares(part, 2)
    for module in SUMMED:
        name = f"model.layers.0.{module}.weight"
        for rank, right in enumerate(tensors[name].dequantize().chunk(2, dim=1)):
            _expect_share(shares, rank, name, right)


def a_bias_after_a_sum_is_added_once(part: Any) -> None:
    """biases of the matrices whose outputs are summed over ranks:"""
    tensors, shares = _checkpoint(), _shares(part, 4)
    for module in SUMMED:
        name = f"model.layers.0.{module}.bias"
        _expect_share(shares, 0, name, tensors[name].dequantize())
        for rank in (1, 2, 3):
            expect(
                name not in shares[rank],
                f"rank {rank} also has {name}, so the sum over ranks would add it several times; "
                "only rank 0 should have it.",
            )


def modules_that_are_not_in_the_plan_stay_whole(part: Any) -> None:
    """norms, which have no entry in PLAN:"""
    tensors, shares = _checkpoint(), _shares(part, 2)
    for name in ("model.norm.weight", "model.layers.1.input_layernorm.weight"):
        for rank in range(2):
            _expect_share(shares, rank, name, tensors[name].dequantize())


def the_vocabulary_is_split(part: Any) -> None:
    """a vocabulary of 29 tokens on two ranks, so 15 and 14:"""
    tensors, shares = _checkpoint(), _shares(part, 2)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        whole = tensors[name].dequantize()
        for rank, right in enumerate((whole[:15], whole[15:])):
            _expect_share(shares, rank, name, right)


def a_kv_head_may_be_on_several_ranks(part: Any) -> None:
    """two KV heads on four ranks, each where its query heads are:"""
    tensors, shares = _checkpoint(), _shares(part, 4)
    for name in ("model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.bias"):
        heads = tensors[name].dequantize().chunk(2)
        for rank in range(4):
            _expect_share(shares, rank, name, heads[rank // 2])


def nothing_is_copied(part: Any) -> None:
    """shards are views of the file's data:"""
    tensors = _checkpoint()
    for name, share in part(tensors, CONFIG, 1, 2).items():
        own, file = (each.data.untyped_storage().data_ptr() for each in (share, tensors[name]))
        expect(own == file, f"{name} was copied; it should be a view of the file's data.")


CHECKS = {
    "shard_tensors": (
        a_single_rank_has_everything,
        a_column_split_cuts_stored_rows,
        a_row_split_cuts_stored_columns,
        a_bias_after_a_sum_is_added_once,
        modules_that_are_not_in_the_plan_stay_whole,
        the_vocabulary_is_split,
        a_kv_head_may_be_on_several_ranks,
        nothing_is_copied,
    ),
    "run_split_layer": SPLIT_LAYER_CHECKS,
}
