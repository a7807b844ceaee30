"""Checks of chapter 41: whose share of a tensor is whose, and its two exercises."""

from typing import Any

import torch
from torch import Tensor

from minigen.config import ModelConfig
from minigen.model.weights import StoredTensor
from minigen.parallel.shard import shard_tensors
from minigen.teach.checks.small_model import FFN, HEAD_DIM, HIDDEN, KV_HEADS, Q_HEADS, VOCAB
from minigen.teach.checks.split_layers import SPLIT_LAYER_CHECKS
from minigen.teach.exercises import Exercise
from minigen.teach.messages import expect, expect_close
from minigen.teach.split_layer import run_split_layer

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
    expect_close(shares[rank][name].dequantise(), right, what, axes)


def one_rank_has_all(part: Any) -> None:
    """one rank alone:"""
    tensors, shares = _checkpoint(), _shares(part, 1)
    for name, tensor in tensors.items():
        _expect_share(shares, 0, name, tensor.dequantise())


def some_outputs_are_some_stored_rows(part: Any) -> None:
    """two ranks, matrices whose outputs are dealt out:"""
    tensors, shares = _checkpoint(), _shares(part, 2)
    for module in (each for each in SHAPES if each not in SUMMED):
        for name in (f"model.layers.1.{module}.weight", f"model.layers.1.{module}.bias"):
            for rank, right in enumerate(tensors[name].dequantise().chunk(2)):
                _expect_share(shares, rank, name, right)


def some_inputs_are_some_stored_columns(part: Any) -> None:
    """two ranks, matrices whose inputs are dealt out:"""
    tensors, shares = _checkpoint(), _shares(part, 2)
    for module in SUMMED:
        name = f"model.layers.0.{module}.weight"
        for rank, right in enumerate(tensors[name].dequantise().chunk(2, dim=1)):
            _expect_share(shares, rank, name, right)


def a_bias_behind_a_sum_is_added_once(part: Any) -> None:
    """biases of the matrices whose outputs are summed over ranks:"""
    tensors, shares = _checkpoint(), _shares(part, 4)
    for module in SUMMED:
        name = f"model.layers.0.{module}.bias"
        _expect_share(shares, 0, name, tensors[name].dequantise())
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
            _expect_share(shares, rank, name, tensors[name].dequantise())


def the_vocabulary_is_dealt_out(part: Any) -> None:
    """29 tokens on two ranks, 15 and 14:"""
    tensors, shares = _checkpoint(), _shares(part, 2)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        whole = tensors[name].dequantise()
        for rank, right in enumerate((whole[:15], whole[15:])):
            _expect_share(shares, rank, name, right)


def a_kv_head_may_be_on_several_ranks(part: Any) -> None:
    """two KV heads on four ranks, each beside its query heads:"""
    tensors, shares = _checkpoint(), _shares(part, 4)
    for name in ("model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.bias"):
        heads = tensors[name].dequantise().chunk(2)
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
        "`Split`, `module_of` and `span` of `minigen.parallel.shard` say how each module is cut, "
        "and where; `rows` and `columns` of a `StoredTensor` cut it without reading it.",
        """from minigen import LLM, SamplingParams

with using(41, shard_tensors=mine):  # rank 0 has yours; the others are processes of their own
    llm = LLM.load(weights="float32", tensor_parallel=3)
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
from minigen.checkpoint import open_checkpoint
from minigen.teach.split_layer import continue_split

checkpoint = open_checkpoint(hub.resolve(hub.DEFAULT_MODEL))
tokenizer = checkpoint.tokenizer()
made = continue_split(checkpoint, 3, tokenizer.encode("The sea is"), 8, run_layer=mine)
print(tokenizer.decode(made))""",
        "Some models run attention and feed-forward side by side, on the same normalised x, and "
        "add both to x. How many messages does such a layer need?",
    ),
)
