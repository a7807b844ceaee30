"""Packing all layers: in one place, one after the other, without a second copy of them."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

from minigen.checkpoint.safetensors import StoredTensor
from minigen.kernels.cpu.packed_weights import PACKERS, pack_weight, stack_panels
from minigen.kernels.cpu.simd import CACHE_LINE, zeros

FORMS = ["int4", "int8", "bfloat16"]
NUM_LAYERS, ROWS, COLUMNS = 160, 64, 256  # so many that all twice would be seen


def layers(num_fused: int) -> list[list[StoredTensor]]:
    rng = np.random.default_rng(0)
    return [[stored(rng) for _ in range(num_fused)] for _ in range(NUM_LAYERS)]


def stored(rng: np.random.Generator) -> StoredTensor:
    numbers = rng.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    data = torch.from_numpy(numbers).view(torch.uint8)
    return StoredTensor("weight", "F32", numbers.shape, data)


@pytest.mark.parametrize("form", FORMS)
def test_layers_begin_with_a_cache_line_and_hold_what_each_packs_to(form: str) -> None:
    matrices = layers(2)
    words = stack_panels(matrices, form).words
    for layer, fused in zip(words, matrices, strict=True):
        assert layer.ctypes.data % CACHE_LINE == 0
        alone = [pack_weight(each, form).words for each in fused]
        assert np.array_equal(layer, np.concatenate(alone))


@pytest.mark.parametrize("shape", [1, 15, (3, 5), (1000, 1000)])
@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.float32, np.float64])
def test_memory_of_zeros_begins_with_a_cache_line(shape: int | tuple[int, ...], dtype: Any) -> None:
    made = zeros(shape, dtype)
    assert made.ctypes.data % CACHE_LINE == 0
    assert made.flags.c_contiguous
    assert made.flags.writeable
    expected = np.zeros(shape, dtype)
    assert (made.shape, made.dtype) == (expected.shape, expected.dtype)
    assert np.array_equal(made, expected)


@pytest.mark.parametrize("form", FORMS)
def test_matrices_in_turn_lie_panel_by_panel(form: str) -> None:
    (first, second), *_ = matrices = layers(2)
    words = stack_panels(matrices, form, in_turn=2).words[0].reshape(2, 2, -1)
    for number, matrix in enumerate((first, second)):
        assert np.array_equal(words[:, number].reshape(-1), pack_weight(matrix, form).words)


@pytest.mark.parametrize("form", FORMS)
def test_packing_never_holds_more_than_the_result_and_a_few_layers(form: str) -> None:
    matrices = layers(1)
    tracemalloc.start()
    try:
        packed = stack_panels(matrices, form)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    layer_in_float32 = ROWS * COLUMNS * 4
    assert peak < packed.words.nbytes + PACKERS * 8 * layer_in_float32
