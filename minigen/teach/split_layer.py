"""A layer on one rank, written out with its messages, and a split model that runs such layers.

The package wraps two of a layer's products instead (`minigen.parallel.sharded`), so that the
model's own code knows nothing of ranks; what is sent is the same.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from minigen.checkpoint import Checkpoint
from minigen.model.attention import attend_packed
from minigen.model.layers import rms_norm, swiglu
from minigen.model.transformer import AttendInLayer, Layer, Rotation, dense_linear, project_qkv
from minigen.parallel.comm import Comm, run_ranks
from minigen.parallel.sharded import ShardedTransformer, SummedLinear, build_share
from minigen.protocols import Linear


def run_split_layer(
    layer: Layer,
    x: Float[Tensor, "tokens hidden"],
    rotation: Rotation,
    attend: AttendInLayer,
    head_dim: int,
    norm_eps: float,
    comm: Comm,
) -> Float[Tensor, "tokens hidden"]:
    """`run_layer` on one rank, whose `layer` has some of the heads, and a slice of the ffn.

    All ranks have the same x, and the norms; all return what the whole layer would.
    """
    normalised = rms_norm(x, layer.attention_norm, norm_eps)
    q, k, v = project_qkv(layer, normalised, rotation, head_dim, norm_eps)
    x = x + comm.all_reduce(layer.out(attend(q, k, v).flatten(-2)))
    hidden = layer.gate_up(rms_norm(x, layer.ffn_norm, norm_eps))
    gate, up = hidden.split(layer.gate_up.parts, dim=-1)
    return x + comm.all_reduce(layer.down(swiglu(gate, up)))


def continue_split(
    checkpoint: Checkpoint,
    num_ranks: int,
    token_ids: SequenceOf[int],
    num_tokens: int,
    run_layer: Callable[..., Tensor] = run_split_layer,
) -> list[int]:
    """The likeliest continuation, by ranks that are threads of this process.

    Every layer is run by `run_layer`. In float32, and without a cache: for a few tokens.
    """
    config = checkpoint.config

    def work(comm: Comm) -> list[int]:
        made: list[int] = []
        with torch.inference_mode():
            linear = dense_linear(torch.float32)
            model = build_share(config, checkpoint.tensors, torch.float32, linear, comm)
            layers = tuple(map(_without_messages, model.share.layers))
            bare = replace(model, share=replace(model.share, layers=layers))
            while len(made) < num_tokens:
                ids = [*token_ids, *made]
                hidden = _hidden(bare, ids, config.sliding_windows, run_layer)
                made.append(int(model.logits(hidden[-1:])[0].argmax()))
        return made

    return run_ranks(num_ranks, work)[0]


def _hidden(
    model: ShardedTransformer,
    token_ids: list[int],
    windows: SequenceOf[int | None],
    run_layer: Callable[..., Tensor],
) -> Tensor:
    share, x = model.share, model.embed(torch.tensor(token_ids))
    rotation = share.rotation(torch.arange(len(token_ids)))
    attend = attend_packed([len(token_ids)], windows)
    for layer_id, layer in enumerate(share.layers):
        in_layer = partial(attend, layer_id)
        x = run_layer(layer, x, rotation, in_layer, share.head_dim, share.norm_eps, model.comm)
    return x


def _without_messages(layer: Layer) -> Layer:
    return replace(layer, out=_own(layer.out), down=_own(layer.down))


def _own(linear: Linear) -> Linear:
    assert isinstance(linear, SummedLinear), "the rank's own part of a sum"
    return linear.linear
