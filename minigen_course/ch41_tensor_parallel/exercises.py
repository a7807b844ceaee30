"""Chapter 41's exercises: cut the tensors into shards, and run a split layer with its messages."""

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
from minigen.parallel.sharding import shard_tensors
from minigen_course.ch41_tensor_parallel.lesson import run_split_layer
from minigen_course.grading.exercise import Exercise
from minigen_course.grading.messages import Wrong, expect, expect_close, expect_equal
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


CONFIG = ModelConfig(
    "llama", VOCAB, HIDDEN, 2, Q_HEADS, KV_HEADS, HEAD_DIM, FFN, 128, 1e-5, 1e4, 1.0, None,
    False, True, True, True, False, (None,) * 2, None, (),
)  # fmt: skip
HEADS, KV, UNITS = Q_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, FFN
# A layer's matrices, as checkpoints store them: [outputs, inputs].
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
    """Every number of the model is another one."""
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
    """What each rank gets; whatever is no dictionary of stored tensors is refused."""
    tensors = _checkpoint()
    before, found = set(tensors), list[dict[str, StoredTensor]]()
    for rank in range(num_ranks):
        share = part(tensors, CONFIG, rank, num_ranks)
        expect(isinstance(share, dict), f"returned {type(share).__name__}; return a dictionary.")
        expect(set(tensors) == before, "the given tensors were changed; they must stay.")
        for name, each in share.items():
            what = f"{name} of rank {rank}"
            expect(
                isinstance(each, StoredTensor),
                f"{what} is a {type(each).__name__}; it should be cut by rows() or columns(), "
                "and still be a StoredTensor in its file.",
            )
        found.append(share)
    return found


def _expect_share(
    shares: list[dict[str, StoredTensor]], rank: int, name: str, right: Tensor
) -> None:
    what = f"{name} of rank {rank} of {len(shares)}"
    expect(name in shares[rank], f"{what} is missing; it should be there.")
    axes = ("row", "column") if right.dim() == 2 else ("place",)
    expect_close(shares[rank][name].dequantize(), right, what, axes)


def one_rank_has_all(part: Any) -> None:
    """one rank alone:"""
    tensors, shares = _checkpoint(), _shares(part, 1)
    for name, tensor in tensors.items():
        _expect_share(shares, 0, name, tensor.dequantize())


def some_outputs_are_some_stored_rows(part: Any) -> None:
    """two ranks, matrices whose outputs are dealt out:"""
    tensors, shares = _checkpoint(), _shares(part, 2)
    for module in (each for each in SHAPES if each not in SUMMED):
        for name in (f"model.layers.1.{module}.weight", f"model.layers.1.{module}.bias"):
            for rank, right in enumerate(tensors[name].dequantize().chunk(2)):
                _expect_share(shares, rank, name, right)


def some_inputs_are_some_stored_columns(part: Any) -> None:
    """two ranks, matrices whose inputs are dealt out:"""
    tensors, shares = _checkpoint(), _shares(part, 2)
    for module in SUMMED:
        name = f"model.layers.0.{module}.weight"
        for rank, right in enumerate(tensors[name].dequantize().chunk(2, dim=1)):
            _expect_share(shares, rank, name, right)


def a_bias_behind_a_sum_is_added_once(part: Any) -> None:
    """biases of the matrices whose outputs are summed over ranks:"""
    tensors, shares = _checkpoint(), _shares(part, 4)
    for module in SUMMED:
        name = f"model.layers.0.{module}.bias"
        _expect_share(shares, 0, name, tensors[name].dequantize())
        for rank in (1, 2, 3):
            expect(
                name not in shares[rank],
                f"rank {rank} has {name}, too: the sum of all ranks would have it "
                "several times; only rank 0 should have it.",
            )


def what_is_in_no_plan_is_everywhere(part: Any) -> None:
    """norms:"""
    tensors, shares = _checkpoint(), _shares(part, 2)
    for name in ("model.norm.weight", "model.layers.1.input_layernorm.weight"):
        for rank in range(2):
            _expect_share(shares, rank, name, tensors[name].dequantize())


def the_vocabulary_is_dealt_out(part: Any) -> None:
    """29 tokens on two ranks, 15 and 14:"""
    tensors, shares = _checkpoint(), _shares(part, 2)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        whole = tensors[name].dequantize()
        for rank, right in enumerate((whole[:15], whole[15:])):
            _expect_share(shares, rank, name, right)


def a_kv_head_may_be_on_several_ranks(part: Any) -> None:
    """two KV heads on four ranks, each beside its query heads:"""
    tensors, shares = _checkpoint(), _shares(part, 4)
    for name in ("model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.bias"):
        heads = tensors[name].dequantize().chunk(2)
        for rank in range(4):
            _expect_share(shares, rank, name, heads[rank // 2])


def nothing_is_read(part: Any) -> None:
    """the shares are views of the file:"""
    tensors = _checkpoint()
    for name, share in part(tensors, CONFIG, 1, 2).items():
        own, file = (each.data.untyped_storage().data_ptr() for each in (share, tensors[name]))
        expect(own == file, f"{name} was copied; it should still be in the file.")


EXERCISES = (
    Exercise(
        "shard_tensors",
        shard_tensors,
        (
            one_rank_has_all,
            some_outputs_are_some_stored_rows,
            some_inputs_are_some_stored_columns,
            a_bias_behind_a_sum_is_added_once,
            what_is_in_no_plan_is_everywhere,
            the_vocabulary_is_dealt_out,
            a_kv_head_may_be_on_several_ranks,
            nothing_is_read,
        ),
        (
            "`PLAN[module_of(name)]` is (split, axis), and `span(config, axis, rank, num_ranks)` "
            "the numbers of that axis which are this rank's. What has no entry stays whole.",
            "`tensor.rows(start, stop)` and `tensor.columns(start, stop)` cut without reading. "
            "Checkpoints store [outputs, inputs]: a column split cuts stored rows.",
            "A bias has one axis, that of the outputs. A column split cuts it as its matrix; "
            "behind a row split it must be added once, so rank 0 alone keeps it.",
        ),
        "Cut a checkpoint by hand: return the rank's share of every tensor, by name. `PLAN`, "
        "`Split`, `module_of` and `span` of `minigen.parallel.sharding` say how each module is "
        "cut, and where; `rows` and `columns` of a `StoredTensor` cut it without reading it.",
        """from minigen import LLM, SamplingParams

with using(41, shard_tensors=mine):  # rank 0 has yours; the others are processes of their own
    llm = LLM.load(weights="float32", tensor_parallel_size=3)
print(llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=12)).text)
llm.close()""",
        "Some checkpoints store gate and up as one matrix, gate's rows first. Which of its rows "
        "are a rank's, and what goes wrong if it is cut like any other?",
    ),
    Exercise(
        "run_split_layer",
        run_split_layer,
        SPLIT_LAYER_CHECKS,
        (
            "Begin with `run_layer` of chapter 15. Which of its lines need what other ranks have?",
            "`out` and `down` are cut by inputs: what they give on one rank is a part of a sum. "
            "All else is made of numbers that this rank has.",
            "Sum before anything is added to x: x is the same on all ranks, and would be summed, "
            "too. Sum before the next norm, which needs the whole x.",
        ),
        "Write a layer as one rank runs it. `layer` has this rank's heads and its slice of the "
        "ffn; x and the norms are the same everywhere, and so must be what you return. "
        "`comm.all_reduce(y)` is the sum of all ranks' y. `rms_norm` and `swiglu` are in "
        "`minigen.model.layers`, `project_qkv` in `minigen.model.transformer`.",
        """from minigen import hub
from minigen.checkpoint.checkpoint import open_checkpoint
from minigen_course.ch41_tensor_parallel.lesson import continue_split

checkpoint = open_checkpoint(hub.resolve(hub.DEFAULT_MODEL))
tokenizer = checkpoint.tokenizer()
made = continue_split(checkpoint, 3, tokenizer.encode("The sea is"), 8, run_layer=mine)
print(tokenizer.decode(made))""",
        "Some models run attention and feed-forward side by side, on the same normalised x, and "
        "add both to x. How many messages does such a layer need?",
    ),
)
