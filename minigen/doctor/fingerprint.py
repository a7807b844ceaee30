"""Hashes the results of fixed computations, to check whether two machines compute the same bits.

The inputs are pseudorandom integers scaled by powers of two, so they are equal on every machine and
do not depend on torch's random generator. Each stage gets such inputs, and not the result of an
earlier stage, so a stage that differs is itself the cause.
"""

import hashlib
import math
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import count

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from minigen.assembly.cpu import linears
from minigen.checkpoint.model_config import ModelConfig
from minigen.checkpoint.safetensors import StoredTensor
from minigen.model.attention import attention
from minigen.model.layers import rms_norm, rotary_frequencies, rotary_tables, swiglu
from minigen.model.transformer import build_transformer, expected_tensors

TORCH_FORMS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
COMPILED_FORMS = ("bfloat16", "int8", "int4")
NUM_TOKENS = 33  # two blocks and a token; not a multiple of a tile
_BLOCK_SIZE = 16
_LAYER = ModelConfig(  # a layer as wide as the default model's
    family="llama",
    vocab_size=1024,
    hidden=576,
    num_layers=1,
    q_heads=9,
    kv_heads=3,
    head_dim=64,
    ffn=1536,
    max_positions=64,
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


def fingerprints(num_threads: int) -> dict[str, dict[str, str] | None]:
    """Return a hash per stage for each weight format; None for kernels not compiled here."""
    tensors = dict(_patterned_tensors())
    found: dict[str, dict[str, str] | None] = {}
    torch.set_num_threads(num_threads)
    for form in TORCH_FORMS:
        found[f"{form}, torch"] = {
            stage: _hash(result) for stage, result in _torch_stages(form, tensors, num_threads)
        }
    compiled = compiled_forms()
    for form in COMPILED_FORMS:
        has_step = form in compiled
        found[f"{form}, compiled"] = (
            _compiled_stages(form, tensors, num_threads) if has_step else None
        )
    return found


def compiled_forms(kv_dtype: str = "bfloat16") -> list[str]:
    """Return the weight formats whose compiled step is on this disk."""
    if find_spec("numba") is None:
        return []
    from minigen.kernels.jit.code_cache import is_compiled

    return [form for form in COMPILED_FORMS if is_compiled(form, kv_dtype)]


def kernel_instructions() -> str | None:
    """Return the instructions by which kernels multiply many tokens; None without Numba."""
    if find_spec("numba") is None:
        return None
    from minigen.kernels.cpu.amx.scratch import instructions

    return instructions()


def pattern(shape: tuple[int, ...], seed: int) -> Float[Tensor, "..."]:
    """Return pseudorandom 24-bit numbers between -1/2 and 1/2, the same on every machine.

    >>> pattern((3,), 1).tolist() == pattern((3,), 1).tolist()
    True
    """
    mixed = np.arange(math.prod(shape), dtype=np.uint32) + np.uint32(seed * 0x9E3779B1 % 2**32)
    for shift in (16, 15):
        mixed = (mixed ^ (mixed >> np.uint32(shift))) * np.uint32(0x45D9F3B)
    numbers = (mixed >> np.uint32(8)).astype(np.float32) - np.float32(2**23)
    return torch.from_numpy(numbers * np.float32(2.0**-24)).reshape(shape)


def _patterned_tensors() -> Iterator[tuple[str, StoredTensor]]:
    for seed, (name, shape) in enumerate(expected_tensors(_LAYER).items()):
        is_matrix = len(shape) == 2
        numbers = pattern(shape, seed) / 8 if is_matrix else pattern(shape, seed) + 1
        rows = numbers if is_matrix else numbers.unsqueeze(0)
        yield name, StoredTensor(name, "F32", shape, rows.contiguous().view(torch.uint8))


def _torch_stages(
    form: str, tensors: dict[str, StoredTensor], num_threads: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield the results of a layer's operations one by one, and the logits of a whole layer."""
    seeds, dtype = count(100), TORCH_FORMS[form]
    make_linear, finish_head = linears(form, num_threads)
    model = build_transformer(_LAYER, tensors, dtype, make_linear, finish_head)
    layer, heads, size = model.layers[0], (_LAYER.q_heads, _LAYER.kv_heads), _LAYER.head_dim

    def inputs(*shape: int) -> Float[Tensor, "..."]:
        return pattern(shape, next(seeds)).to(dtype)

    yield "inputs", inputs(NUM_TOKENS, _LAYER.hidden)
    yield "sum of a million", inputs(2**20).sum()
    yield "RMSNorm", rms_norm(inputs(NUM_TOKENS, _LAYER.hidden), layer.ffn_norm, _LAYER.norm_eps)
    frequencies = rotary_frequencies(size, _LAYER.rope_theta)
    yield "rotation", torch.cat(rotary_tables(frequencies, torch.arange(NUM_TOKENS)))
    yield "softmax", torch.softmax(inputs(NUM_TOKENS, _LAYER.vocab_size) * 16, dim=-1)
    yield "SwiGLU", swiglu(*(inputs(NUM_TOKENS, _LAYER.ffn) * 16 for _ in range(2)))
    yield "product of one row", layer.gate_up(inputs(1, _LAYER.hidden))
    yield f"product of {NUM_TOKENS} rows", layer.gate_up(inputs(NUM_TOKENS, _LAYER.hidden))
    q = inputs(NUM_TOKENS, heads[0], size)
    k, v = (inputs(NUM_TOKENS, heads[1], size) for _ in range(2))
    yield "attention", attention(q * 4, k * 4, v, None)
    token_ids, positions = torch.from_numpy(_token_ids()), torch.arange(NUM_TOKENS)
    hidden = model(token_ids, positions, lambda _, q, k, v: attention(q, k, v, None))
    yield "logits of a layer", model.logits(hidden)


def _compiled_stages(
    form: str, tensors: dict[str, StoredTensor], num_threads: int
) -> dict[str, str]:
    """Hash the logits of the compiled step, after a prefill and after one decode step."""
    from minigen.engine.model_runner import Packed
    from minigen.kernels.cpu.arrays.step_arrays import kernel_shape, kernel_weights
    from minigen.kernels.cpu.kv.layout import PackedKVPool
    from minigen.kernels.cpu.runner import CompiledRunner
    from minigen.kv_cache.block_allocator import BlockAllocator
    from minigen.kv_cache.block_manager import BlockManager
    from minigen.trace.events import Trace

    num_blocks = _LAYER.max_positions // _BLOCK_SIZE
    shape = kernel_shape(_LAYER, _BLOCK_SIZE, num_blocks)
    manager = BlockManager(BlockAllocator(num_blocks), None, _BLOCK_SIZE, 1, num_blocks, Trace())
    runner = CompiledRunner(
        shape,
        kernel_weights(_LAYER, tensors, form),
        PackedKVPool(shape, "bfloat16"),
        manager,
        _LAYER.sliding_windows,
        NUM_TOKENS,
        num_threads,
    )
    tables = np.arange(1, num_blocks + 1).reshape(1, -1)

    def logits(first: int, end: int) -> str:
        positions = np.arange(first, end)
        packed = Packed(
            token_ids=np.resize(_token_ids(), end)[first:],
            positions=positions,
            slots=positions + _BLOCK_SIZE,
            query_starts=np.array([0, end - first]),
            context_lens=np.array([end]),
            block_tables=tables,
            logits_rows=np.array([end - first - 1]),
        )
        found = np.zeros(_LAYER.vocab_size, np.float32)
        runner.run(packed, found)
        return _hash(torch.from_numpy(found))

    return {
        f"logits after {NUM_TOKENS} tokens": logits(0, NUM_TOKENS),
        "logits after one more": logits(NUM_TOKENS, NUM_TOKENS + 1),
    }


def _token_ids() -> Int64[np.ndarray, " tokens"]:
    return np.arange(NUM_TOKENS, dtype=np.int64) * 389 % _LAYER.vocab_size


def _hash(result: Tensor) -> str:
    """Return 16 digits of the sha256 of the result's bytes."""
    number_bytes = result.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(number_bytes).hexdigest()[:16]
