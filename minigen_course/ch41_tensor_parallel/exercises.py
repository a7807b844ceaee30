"""Chapter 41's exercises: ring and tree, shards of tensors, split layers with their messages."""

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
from minigen_course.grading.exercise import Wrong, expect, expect_close, expect_equal, of_pure_part
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
    layer: Layer, x: Tensor, rotation: Any, attend: Any, head_dim: int, eps: float, comm: Any
) -> Tensor:
    return run_split_layer(layer, x, rotation, attend, head_dim, eps, SoloComm())


def _x_summed_too(
    layer: Layer, x: Tensor, rotation: Any, attend: Any, head_dim: int, eps: float, comm: Any
) -> Tensor:
    q, k, v = project_qkv(layer, rms_norm(x, layer.attention_norm, eps), rotation, head_dim, eps)
    x = comm.all_reduce(x + layer.out(attend(q, k, v).flatten(-2)))
    gate, up = layer.gate_up(rms_norm(x, layer.ffn_norm, eps)).chunk(2, dim=-1)
    return comm.all_reduce(x + layer.down(swiglu(gate, up)))


def _one_sum_at_the_end(
    layer: Layer, x: Tensor, rotation: Any, attend: Any, head_dim: int, eps: float, comm: Any
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


def _parallel_whole(num_tokens: int) -> Tensor:
    """Return the result of a layer whose two halves both read x after `attention_norm`."""
    (x, rotation), layer = _inputs(num_tokens), random_layer()
    ready = rms_norm(x, layer.attention_norm, EPS)
    attended = layer.out(attention(*project_qkv(layer, ready, rotation, HEAD_DIM, EPS)).flatten(-2))
    gate, up = layer.gate_up(ready).chunk(2, dim=-1)
    return x + attended + layer.down(swiglu(gate, up))


def one_rank_adds_both_halves_to_x(part: Any) -> None:
    """a single rank, which has all heads and the whole ffn:"""
    x, rotation = _inputs(4)
    found = part(random_layer(), x, rotation, attention, HEAD_DIM, EPS, SoloComm())
    expect_close(found, _parallel_whole(4), "the result", AXES)


def every_rank_returns_the_result_of_the_whole_parallel_layer(part: Any) -> None:
    """two ranks:"""
    for num_tokens in (5, 1):
        for rank, found in enumerate(_on_ranks(part, 2, num_tokens)[0]):
            what = f"the result of rank {rank} for {num_tokens} tokens"
            expect_close(found, _parallel_whole(num_tokens), what, AXES)


def each_rank_sends_one_message_of_the_size_of_x(part: Any) -> None:
    """the messages that each of two ranks sends:"""
    for rank, recorded in enumerate(_on_ranks(part, 2)[1]):
        what = f"the messages of rank {rank}, with their shapes"
        expect_equal(recorded.sent, [("all_reduce", [5, HIDDEN])], what)


def _expect_way(
    part: Any, given: tuple[float, int, float, float], right: tuple[str, float]
) -> None:
    num_bytes, num_ranks, latency, bandwidth = given
    found = part(num_bytes, num_ranks, latency, bandwidth)
    what = f"{num_bytes:,} bytes on {num_ranks} ranks, {latency} s and {bandwidth:,} bytes/s"
    pair = isinstance(found, tuple | list) and len(found) == 2
    expect(pair, f"{what}: got {found!r}; return the pair of a word and seconds.")
    word, seconds = found
    expect_equal(word, right[0], what)
    near = isinstance(seconds, int | float) and abs(seconds - right[1]) <= 1e-9 * max(1, right[1])
    expect(near, f"{what}: got {seconds!r} seconds; it should be {right[1]:.6g}.")


def a_small_message_takes_the_tree(part: Any) -> None:
    """one byte, where only turns count:"""
    for num_ranks, turns in ((4, 4), (8, 6), (16, 8), (64, 12)):
        _expect_way(part, (1, num_ranks, 3.0, 1e12), ("tree", turns * (3.0 + 1e-12)))


def a_large_message_takes_the_ring(part: Any) -> None:
    """many bytes, where each rank should move as few as possible:"""
    for num_ranks, turns in ((3, 4), (4, 6), (8, 14)):
        right = turns * (1.0 + 12_000 / num_ranks / 10)
        _expect_way(part, (12_000, num_ranks, 1.0, 10.0), ("ring", right))


def ranks_that_are_no_power_of_two_round_the_turns_up(part: Any) -> None:
    """5, 6 and 12 ranks:"""
    for num_ranks, turns in ((5, 6), (6, 6), (12, 8)):
        _expect_way(part, (100, num_ranks, 7.0, 100.0), ("tree", turns * (7.0 + 1.0)))


def two_ranks_and_one_rank(part: Any) -> None:
    """two ranks, where both take two turns, and one rank, which sends nothing:"""
    _expect_way(part, (100, 2, 1.0, 100.0), ("ring", 2 * (1.0 + 0.5)))
    _expect_way(part, (0, 2, 1.0, 100.0), ("ring", 2.0))  # equally long
    _expect_way(part, (100, 1, 1.0, 100.0), ("ring", 0.0))


ALL_REDUCE_CHECKS = (
    a_small_message_takes_the_tree,
    a_large_message_takes_the_ring,
    ranks_that_are_no_power_of_two_round_the_turns_up,
    two_ranks_and_one_rank,
)


def _ring(part: Any, num_ranks: int, piece: int) -> tuple[Tensor, list[Any], list[int]]:
    """Run a ring on ranks; return all ranks' x, their results, and the messages of each."""
    drawn = torch.randn(num_ranks, num_ranks * piece, generator=torch.Generator().manual_seed(7))
    sent = [0] * num_ranks

    def work(comm: Comm) -> Any:
        def pass_on(given: Tensor) -> Tensor:
            expect(isinstance(given, Tensor), "pass_on takes a piece of x; it must be a tensor.")
            expect_equal(list(given.shape), [piece], "the shape of a message, an n-th of x")
            sent[comm.rank] += 1
            return comm.all_gather(given.clone()).chunk(num_ranks)[comm.rank - 1]

        given = drawn[comm.rank].clone()
        found = part(given, comm.rank, num_ranks, pass_on)
        same = torch.equal(given, drawn[comm.rank])
        expect(same, "x was changed in place; return a new tensor instead.")
        return found

    try:
        return drawn, run_ranks(num_ranks, work, 2.0), sent
    except WorkerError as error:
        raise Wrong(f"{error} All ranks should call pass_on equally often.") from None


def every_rank_of_the_ring_has_the_sum(part: Any) -> None:
    """1 to 5 ranks, pieces of 1 or 3 numbers:"""
    for num_ranks, piece in ((2, 1), (3, 1), (1, 3), (4, 3), (5, 1)):
        drawn, made, _ = _ring(part, num_ranks, piece)
        for rank, found in enumerate(made):
            what = f"the result of rank {rank} of {num_ranks}"
            expect_close(found, drawn.sum(dim=0), what, ("number",))


def the_ring_takes_two_n_minus_two_turns(part: Any) -> None:
    """the messages that each rank passes on:"""
    for num_ranks in (1, 2, 4):
        _, _, sent = _ring(part, num_ranks, 2)
        what = f"the messages of each of {num_ranks} ranks"
        expect_equal(sent, [2 * (num_ranks - 1)] * num_ranks, what)


def _expect_rows(
    part: Any, parts: list[int], rank: int, num_ranks: int, right: list[range]
) -> None:
    found = part(parts, rank, num_ranks)
    what = f"rows of matrices of {parts} rows, rank {rank} of {num_ranks}"
    listed = isinstance(found, list | tuple) and all(isinstance(each, range) for each in found)
    expect(listed, f"{what}: got {found!r}; return a list of ranges.")
    expect_equal(list(found), right, what)


def gate_and_up_are_each_cut(part: Any) -> None:
    """gate and up of 6 rows each, on three ranks:"""
    for rank in range(3):
        right = [range(2 * rank, 2 * rank + 2), range(6 + 2 * rank, 8 + 2 * rank)]
        _expect_rows(part, [6, 6], rank, 3, right)


def parts_may_have_different_sizes(part: Any) -> None:
    """queries of 8 rows, keys and values of 4, on two ranks:"""
    _expect_rows(part, [8, 4, 4], 0, 2, [range(4), range(8, 10), range(12, 14)])
    _expect_rows(part, [8, 4, 4], 1, 2, [range(4, 8), range(10, 12), range(14, 16)])
    _expect_rows(
        part, [4, 12, 8, 4], 3, 4, [range(3, 4), range(13, 16), range(22, 24), range(27, 28)]
    )


def one_matrix_and_one_rank(part: Any) -> None:
    """a single matrix, and a single rank:"""
    _expect_rows(part, [10], 1, 2, [range(5, 10)])
    _expect_rows(part, [3, 5], 0, 1, [range(3), range(3, 8)])


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
    "choose_all_reduce": ALL_REDUCE_CHECKS,
    "ring_all_reduce": (every_rank_of_the_ring_has_the_sum, the_ring_takes_two_n_minus_two_turns),
    "fused_rows": of_pure_part(
        gate_and_up_are_each_cut,
        parts_may_have_different_sizes,
        one_matrix_and_one_rank,
    ),
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
    "run_parallel_layer": (
        one_rank_adds_both_halves_to_x,
        every_rank_returns_the_result_of_the_whole_parallel_layer,
        each_rank_sends_one_message_of_the_size_of_x,
    ),
}
