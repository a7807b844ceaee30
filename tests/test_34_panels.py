"""Packing all layers: in one array, one after the other, without a second copy of them."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

from minigen.checkpoint.safetensors import StoredTensor
from minigen.kernels.cpu.arrays.aligned import CACHE_LINE, zeros
from minigen.kernels.cpu.packed_weights import PACKERS, pack_layers, pack_rows, pack_weight

FORMS = ["int4", "int8", "bfloat16"]
NUM_LAYERS, ROWS, COLUMNS = 160, 64, 256  # large enough that a second copy would be noticed


def layers(num_fused: int) -> list[list[StoredTensor]]:
    rng = np.random.default_rng(0)
    return [[stored(rng) for _ in range(num_fused)] for _ in range(NUM_LAYERS)]


def stored(rng: np.random.Generator) -> StoredTensor:
    numbers = rng.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    data = torch.from_numpy(numbers).view(torch.uint8)
    return StoredTensor("weight", "F32", numbers.shape, data)


@pytest.mark.parametrize("form", FORMS)
def test_layers_start_at_a_cache_line_and_equal_their_separate_packing(form: str) -> None:
    matrices = layers(2)
    words = pack_layers(matrices, form).words
    for layer, fused in zip(words, matrices, strict=True):
        assert layer.ctypes.data % CACHE_LINE == 0
        alone = [pack_weight(each, form).words for each in fused]
        assert np.array_equal(layer, np.concatenate(alone))


@pytest.mark.parametrize("shape", [1, 15, (3, 5), (1000, 1000)])
@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.float32, np.float64])
def test_arrays_of_zeros_start_at_a_cache_line(shape: int | tuple[int, ...], dtype: Any) -> None:
    made = zeros(shape, dtype)
    assert made.ctypes.data % CACHE_LINE == 0
    assert made.flags.c_contiguous
    assert made.flags.writeable
    expected = np.zeros(shape, dtype)
    assert (made.shape, made.dtype) == (expected.shape, expected.dtype)
    assert np.array_equal(made, expected)


@pytest.mark.parametrize("form", FORMS)
def test_several_matrices_are_packed_panel_by_panel(form: str) -> None:
    (first, second), *_ = matrices = layers(2)
    words = pack_layers(matrices, form, interleave=2).words[0].reshape(2, 2, -1)
    for number, matrix in enumerate((first, second)):
        assert np.array_equal(words[:, number].reshape(-1), pack_weight(matrix, form).words)


@pytest.mark.parametrize("form", FORMS)
def test_packing_never_holds_more_than_the_result_and_a_few_layers(form: str) -> None:
    matrices = layers(1)
    pack_layers(matrices, form)  # what is imported and compiled at first is not the layers'
    tracemalloc.start()
    try:
        packed = pack_layers(matrices, form)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    layer_in_float32 = ROWS * COLUMNS * 4  # a packer holds up to nine of these at a time
    allowed = PACKERS * 12 * layer_in_float32
    assert allowed < packed.words.nbytes, "a second copy would be noticed"
    assert peak < packed.words.nbytes + allowed


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_rows", [16, 48, 16 * 97, 16 * 256])
def test_a_matrix_packed_in_slices_equals_the_whole(form: str, num_rows: int) -> None:
    numbers = np.random.default_rng(num_rows).standard_normal((num_rows, 64)).astype(np.float32)
    data = torch.from_numpy(numbers).view(torch.uint8)
    matrix = StoredTensor("weight", "F32", numbers.shape, data)
    (words,) = pack_rows(matrix, form).words
    assert np.array_equal(words, pack_weight(matrix, form).words)


def test_packing_one_large_matrix_holds_little_more_than_the_result() -> None:
    data = torch.zeros(16 * 512, 512 // 32 * 34, dtype=torch.uint8)
    matrix = StoredTensor("weight", "Q8_0", (16 * 512, 512), data)
    pack_rows(matrix, "int8")  # what is imported and compiled at first is not the matrix's
    tracemalloc.start()
    try:
        packed = pack_rows(matrix, "int8")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.3 * packed.words.nbytes
