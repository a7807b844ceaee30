"""Compile the whole step ahead of time, on a model of one tiny layer: only types count."""

import numpy as np
import torch

from minigen.config import ModelConfig
from minigen.kernels.assembly import kernel_shape, kernel_weights
from minigen.kernels.compiled import is_compiled, run_step, tell_compiled
from minigen.kernels.paging import Packed, PanelPool, make_scratch
from minigen.kernels.runner import EVERYTHING, make_workspace
from minigen.kernels.threads import one_at_a_time
from minigen.model.transformer import expected_tensors
from minigen.model.weights import StoredTensor

_BLOCK_SIZE = 16
_TINY = ModelConfig(
    family="llama",
    vocab_size=32,
    hidden=32,
    num_layers=1,
    q_heads=1,
    kv_heads=1,
    head_dim=32,
    ffn=32,
    max_positions=_BLOCK_SIZE,
    norm_eps=1e-5,
    rope_theta=1e4,
    rope_linear_factor=1.0,
    rope_scaling=None,
    tied_embeddings=True,
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    qk_norm=False,
    sliding_windows=(None,),
    bos_token_id=None,
    eos_token_ids=(),
)


def compile_step(form: str) -> None:
    """Have the step for weights of this form compiled, and kept on disk: seconds, once."""
    if is_compiled(form):
        return
    config = _TINY
    tensors = {name: _zeros(name, shape) for name, shape in expected_tensors(config).items()}
    shape = kernel_shape(config, _BLOCK_SIZE, 1)
    pool = PanelPool(1, 1, config.kv_heads, _BLOCK_SIZE, config.head_dim)
    none = np.zeros(1, np.int64)
    packed = Packed(none, none, none, np.arange(2), none + 1, none.reshape(1, 1), none)
    with one_at_a_time(1):
        run_step(
            shape,
            kernel_weights(config, tensors, form),
            np.array([EVERYTHING], np.int64),
            packed,
            pool.cache,
            make_scratch(shape, 8, _BLOCK_SIZE, 1),
            make_workspace(shape, 8, form == "bfloat16"),
            1,
            np.zeros(config.vocab_size, np.float32),
        )
    tell_compiled(form)


def _zeros(name: str, shape: tuple[int, ...]) -> StoredTensor:
    rows = shape if len(shape) == 2 else (1, *shape)
    numbers = torch.zeros(rows, dtype=torch.float32)
    return StoredTensor(name, "F32", shape, numbers.view(torch.uint8))
