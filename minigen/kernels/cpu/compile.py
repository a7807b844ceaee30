"""Compile the whole step ahead of time, and measure its speed on this machine.

Compiling depends only on types, so the model is one tiny layer. The speeds that `auto` compares are
measured with layers too large for the caches, next to the matrix products of torch's runner.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from minigen.checkpoint.model_config import ModelConfig
from minigen.checkpoint.safetensors import StoredTensor
from minigen.engine.model_runner import Packed
from minigen.hardware import torch_threads
from minigen.kernels.cpu.arrays.step_arrays import (
    kernel_shape,
    kernel_weights,
    make_workspace,
    num_phases,
)
from minigen.kernels.cpu.kv.layout import PackedKVPool, make_scratch
from minigen.kernels.cpu.runner import EVERYTHING, KernelChooser, run_step
from minigen.kernels.cpu.team import available_threads, team_of
from minigen.kernels.jit.code_cache import is_compiled, report_compiled
from minigen.kernels.onednn import best_for
from minigen.model.layers import DenseLinear
from minigen.model.transformer import expected_tensors
from minigen.sampling.params import SamplingParams
from minigen.sequence import Sequence

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
_TIMED = replace(
    _TINY,
    hidden=1024,
    num_layers=4,
    q_heads=16,
    kv_heads=4,
    head_dim=64,
    ffn=4096,
    sliding_windows=(None,) * 4,
)


def compile_step(form: str, kv_dtype: str = "bfloat16") -> None:
    """Compile the step for weights of this form and store it on disk; takes seconds, once.

    `kv_dtype`, "bfloat16" or "int8", is the type of keys and values; each has its own machine code.
    """
    if is_compiled(form, kv_dtype):
        return
    _one_token_step(_TINY, form, kv_dtype, 1)()
    _choose_once()
    report_compiled(form, kv_dtype, _measure(form, kv_dtype))


def _choose_once() -> None:
    """Compile the sampling kernels by choosing one token with each."""
    logits, choose = torch.zeros(1, _TINY.vocab_size), KernelChooser(_TINY.vocab_size, 1)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature)
        choose(logits, [Sequence(1, (1,), params, 0, 1, frozenset())])


def _measure(form: str, kv_dtype: str) -> dict[str, float]:
    """Measure weights per second of the compiled step, and of torch in bfloat16 and float32."""
    num_threads = torch_threads()
    num_weights = sum(
        shape[0] * shape[1] for shape in expected_tensors(_TIMED).values() if len(shape) == 2
    )
    step = _one_token_step(_TIMED, form, kv_dtype, available_threads(num_threads))
    torch.set_num_threads(num_threads)
    work = {"compiled": num_weights}
    runs: dict[str, Callable[[], object]] = {"compiled": step}
    for dtype in (torch.bfloat16, torch.float32):
        weight, x = torch.ones(2**14, 2**11, dtype=dtype), torch.ones(1, 2**11, dtype=dtype)
        name, (_, finish) = str(dtype).removeprefix("torch."), best_for(dtype)
        linear = finish(DenseLinear(weight, None, (len(weight),)))
        work[name], runs[name] = weight.numel(), partial(linear, x)
    return {name: work[name] / seconds for name, seconds in _fewest_seconds(runs).items()}


def _fewest_seconds(runs: Mapping[str, Callable[[], object]], times: int = 15) -> dict[str, float]:
    """Return the fastest run of each, by turns, so that other programs disturb all of them alike.

    The result is kept, and the median of a moment in which another program has the cores would
    make `auto` choose the slower way as long as this version is used.
    """
    fewest = dict.fromkeys(runs, math.inf)
    for _ in range(times):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            fewest[name] = min(fewest[name], time.perf_counter() - started)
    return fewest


def _one_token_step(
    config: ModelConfig, form: str, kv_dtype: str, num_threads: int
) -> Callable[[], None]:
    """Return a function that runs a step of one token of a model whose weights are 0."""
    tensors = {name: _zeros(name, shape) for name, shape in expected_tensors(config).items()}
    shape = kernel_shape(config, _BLOCK_SIZE, 1, kv_dtype)
    weights = kernel_weights(config, tensors, form)
    pool = PackedKVPool(shape, kv_dtype)
    none = np.zeros(1, np.int64)
    packed = Packed(none, none, none, np.arange(2), none + 1, none.reshape(1, 1), none)
    windows = np.full(config.num_layers, EVERYTHING, np.int64)
    scratch = make_scratch(shape, 8, num_threads, kv_dtype)
    work = make_workspace(shape, 8, num_threads, form == "bfloat16")
    logits = np.zeros(config.vocab_size, np.float32)
    team = team_of(num_threads)
    return lambda: team.run(
        num_phases(shape),
        run_step,
        shape,
        weights,
        windows,
        packed,
        pool.cache,
        scratch,
        work,
        logits,
    )


def _zeros(name: str, shape: tuple[int, ...]) -> StoredTensor:
    rows = shape if len(shape) == 2 else (1, *shape)
    numbers = torch.zeros(rows, dtype=torch.float32)
    return StoredTensor(name, "F32", shape, numbers.view(torch.uint8))
