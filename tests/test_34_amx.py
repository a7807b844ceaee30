"""AMX tiles: the bits of vector instructions, the order of bfloat16 sums, and the permission."""

import hashlib
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from numba import njit

from minigen.checkpoint.safetensors import StoredTensor
from minigen.kernels.cpu.amx import scratch
from minigen.kernels.cpu.amx.products import FEWEST_OF_CODES4, FEWEST_OF_CODES8
from minigen.kernels.cpu.amx.scratch import BLOCK, USE_TILES
from minigen.kernels.cpu.amx.tiles import (
    configuration,
    configure,
    release,
    tile_bfloat_dots,
    tile_byte_dots,
    tile_load,
    tile_store,
    tile_zero,
)
from minigen.kernels.cpu.arrays.inputs import quantized, rounded
from minigen.kernels.cpu.arrays.step_arrays import product_scratch
from minigen.kernels.cpu.elementwise import prepare
from minigen.kernels.cpu.linear import multiply, multiply_and_gate
from minigen.kernels.cpu.packed_weights import PackedWeights, pack_layers
from minigen.kernels.cpu.simd import FEATURES
from minigen.kernels.cpu.team import pool_of_one
from minigen.kernels.jit.code_cache import fingerprint
from tests.processes import said_by
from tools.chapters import ROOT
from tools.portability.environments import AVX2_ALONE

needs_tiles = pytest.mark.skipif(
    not USE_TILES, reason="this processor or this system has no AMX tiles"
)
FORMS = ["int4", "int8", "bfloat16"]


def packed(rng: np.random.Generator, form: str, shape: tuple[int, int]) -> PackedWeights:
    numbers = rng.standard_normal(shape).astype(np.float32)
    data = torch.from_numpy(numbers).view(torch.uint8)
    return pack_layers([[StoredTensor("weight", "F32", shape, data)]], form)


def product(form: str, weights: PackedWeights, x: np.ndarray, width: int, add: bool) -> np.ndarray:
    num_tokens, columns = x.shape
    inputs: Any = (rounded if form == "bfloat16" else quantized)(num_tokens, columns)
    prepare(pool_of_one(), x.reshape(-1), num_tokens, columns, inputs)
    out = np.full(num_tokens * width, 0.5 if add else np.nan, np.float32)
    groups = columns // 32
    room = product_scratch(form == "bfloat16", groups, 1)
    multiply(pool_of_one(), weights, 0, inputs, num_tokens, groups, out, width, add, room)
    return out.reshape(num_tokens, width)


def gated(form: str, gate_up: PackedWeights, x: np.ndarray, down: PackedWeights) -> np.ndarray:
    """Return a feed-forward layer's output, [tokens, 16], whose hidden size is 64."""
    num_tokens, columns = x.shape
    make: Any = rounded if form == "bfloat16" else quantized
    inputs, hidden = make(num_tokens, columns), make(num_tokens, 64)
    prepare(pool_of_one(), x.reshape(-1), num_tokens, columns, inputs)
    groups = columns // 32
    room = product_scratch(form == "bfloat16", groups, 1)
    multiply_and_gate(pool_of_one(), gate_up, 0, inputs, num_tokens, groups, 64, hidden, room)
    out = np.empty(num_tokens * 16, np.float32)
    multiply(pool_of_one(), down, 0, hidden, num_tokens, 2, out, 16, False, room)
    return out.reshape(num_tokens, 16)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("columns", "width"), [(32, 16), (64, 48), (96, 80), (576, 192)])
def test_a_tokens_products_are_bit_equal_alone_and_with_up_to_69_others(
    form: str, columns: int, width: int
) -> None:
    """With AMX, a token alone goes by vectors, and tokens together by tiles."""
    rng = np.random.default_rng(columns)
    weights = packed(rng, form, (width, columns))
    x = 3 * rng.standard_normal((70, columns)).astype(np.float32)
    x[::3] = np.abs(x[::3])  # their zero point is 128, which no signed byte holds
    x[1, :32] = 0
    x[2, 5] = 1e4
    for add in (False, True):
        alone = np.concatenate([product(form, weights, each[None], width, add) for each in x])
        for num_tokens in range(2, 71):
            found = product(form, weights, x[:num_tokens], width, add)
            np.testing.assert_array_equal(found.view(np.int32), alone[:num_tokens].view(np.int32))


@pytest.mark.parametrize("form", FORMS)
def test_groups_in_several_parts_and_tokens_in_several_blocks_change_no_bit(form: str) -> None:
    """37 groups are cut in parts whose weights stay in the L1 cache, tokens in blocks."""
    rng = np.random.default_rng(5)
    weights = packed(rng, form, (80, 37 * 32))
    x = rng.standard_normal((2 * BLOCK + 19, 37 * 32)).astype(np.float32)
    alone = np.concatenate([product(form, weights, each[None], 80, True) for each in x])
    for num_tokens in (BLOCK - 16, BLOCK, BLOCK + 1, BLOCK + 33, 2 * BLOCK + 19):
        found = product(form, weights, x[:num_tokens], 80, True)
        np.testing.assert_array_equal(found.view(np.int32), alone[:num_tokens].view(np.int32))


@pytest.mark.parametrize("form", FORMS)
def test_gated_products_are_bit_equal_alone_and_together(form: str) -> None:
    rng = np.random.default_rng(7)
    gate_up, down = packed(rng, form, (128, 96)), packed(rng, form, (16, 64))
    x = rng.standard_normal((50, 96)).astype(np.float32)
    alone = np.concatenate([gated(form, gate_up, each[None], down) for each in x])
    for num_tokens in (3, FEWEST_OF_CODES4 - 1, FEWEST_OF_CODES4, FEWEST_OF_CODES8, 50):
        found = gated(form, gate_up, x[:num_tokens], down)
        np.testing.assert_array_equal(found.view(np.int32), alone[:num_tokens].view(np.int32))


@pytest.mark.parametrize("form", ["int4", "int8"])
@pytest.mark.parametrize("damage", [np.nan, np.inf])
def test_nan_and_infinity_stay_in_their_token(form: str, damage: float) -> None:
    rng = np.random.default_rng(0)
    weights = packed(rng, form, (32, 64))
    x = rng.standard_normal((50, 64)).astype(np.float32)
    x[4, 40] = damage
    found = product(form, weights, x, 32, False)
    assert not np.isfinite(found[4]).any()
    assert np.isfinite(np.delete(found, 4, axis=0)).all()


def test_bfloat16_and_float32_hold_what_tiles_compute_from_codes() -> None:
    """Inputs are at most 254, weights at most 128, and a group has 32 products."""
    whole = torch.arange(-256, 257).float()
    assert torch.equal(whole.bfloat16().float(), whole)
    assert 32 * 254 * 128 < 2**24  # so float32 holds each sum of the products, in any order


@njit
def _one_tile(shapes, a, b, out):  # type: ignore[no-untyped-def]
    configure(shapes, 0)
    tile_zero(0)
    tile_load(1, a, 0, a.shape[0] // 16)
    tile_load(2, b, 0, b.shape[0] // 16)
    tile_bfloat_dots(0, 1, 2)
    tile_bfloat_dots(0, 1, 2)
    tile_store(0, out, 0, 16)
    release()


@njit
def _one_tile_of_bytes(shapes, a, b, out):  # type: ignore[no-untyped-def]
    configure(shapes, 0)
    tile_zero(3)
    tile_load(4, a, 0, 64)
    tile_load(5, b, 0, 64)
    tile_byte_dots(3, 4, 5)
    tile_store(3, out, 0, 16)
    release()


_ALL_TILES = configuration(dict.fromkeys(range(8), (16, 64)))


def tile_sums(a: np.ndarray, b: np.ndarray, times: int) -> np.ndarray:
    """Return C of `TDPBF16PS` for A [16, 32] and B [16 outputs, 32], added to 0 a number of times.

    Even columns are a chain of fused multiply-adds, odd columns another one. Then the even sum is
    added to the odd one, and that to C. A product of two bfloat16 numbers has 16 bits, so float64
    holds it and its sum with a float32 number of like size exactly: rounding it is a fused one.
    """
    chains = np.zeros((2, 16, 16), np.float32)
    for column in range(32):
        products = np.outer(a[:, column], b[:, column].astype(np.float64))
        chains[column % 2] = (chains[column % 2] + products).astype(np.float32)
    total = np.zeros((16, 16), np.float32)
    for _ in range(times):
        total = total + (chains[0] + chains[1])
    return total


def bfloats(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return a tile of random bfloat16 numbers, as float32 and as their bits."""
    numbers = torch.from_numpy(rng.standard_normal((16, 32)).astype(np.float32)).bfloat16()
    return numbers.float().numpy(), numbers.view(torch.int16).numpy().copy()


@needs_tiles
def test_bfloat16_tiles_add_even_and_odd_columns_apart() -> None:
    rng = np.random.default_rng(3)
    (a, a_bits), (b, b_bits) = bfloats(rng), bfloats(rng)
    pairs = b_bits.view(np.int32).T.reshape(-1).copy()  # row k: columns 2k, 2k + 1 of all outputs
    found = np.empty(256, np.float32)
    _one_tile(_ALL_TILES, a_bits.view(np.int32).reshape(-1), pairs, found)
    expected = tile_sums(a, b, times=2)
    np.testing.assert_array_equal(found.reshape(16, 16).view(np.int32), expected.view(np.int32))
    in_order = np.zeros((16, 16), np.float32)
    for column in range(32):
        products = np.outer(a[:, column], b[:, column].astype(np.float64))
        in_order = (in_order + products).astype(np.float32)
    assert (2 * in_order != expected).any()  # the order matters


@needs_tiles
def test_tiles_multiply_signed_by_unsigned_bytes() -> None:
    rng = np.random.default_rng(4)
    a = rng.integers(-128, 128, (16, 64)).astype(np.int8)
    b = rng.integers(0, 256, (16, 64)).astype(np.uint8)  # [outputs, columns]
    words = b.view(np.int32).T.copy().view(np.uint8).reshape(-1)
    found = np.empty(256, np.int32)
    _one_tile_of_bytes(_ALL_TILES, a.reshape(-1), words, found)
    assert np.array_equal(found.reshape(16, 16), a.astype(np.int32) @ b.astype(np.int32).T)


@needs_tiles
def test_bfloat16_weights_are_multiplied_in_the_order_of_tiles_for_one_token_too() -> None:
    rng = np.random.default_rng(5)
    numbers = torch.from_numpy(rng.standard_normal((16, 96)).astype(np.float32)).bfloat16().float()
    stored = StoredTensor("weight", "F32", (16, 96), numbers.view(torch.uint8))
    x = torch.from_numpy(rng.standard_normal((1, 96)).astype(np.float32)).bfloat16().float().numpy()
    found = product("bfloat16", pack_layers([[stored]], "bfloat16"), x, 16, False)
    expected = np.zeros(16, np.float32)
    for group in range(0, 96, 32):
        a, b = np.zeros((16, 32), np.float32), numbers.numpy()[:, group : group + 32]
        a[0] = x[0, group : group + 32]
        expected = expected + tile_sums(a, b, times=1)[0]
    np.testing.assert_array_equal(found[0].view(np.int32), expected.view(np.int32))


class _Refusing:
    """The C library of a system that refuses tiles."""

    def syscall(self, *_: object) -> int:
        return -1


def test_a_refused_permission_means_no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch.ctypes, "CDLL", lambda name: _Refusing())
    monkeypatch.setattr(scratch, "permitted", scratch.permitted.__wrapped__)
    assert not scratch.has_tiles()


_REFUSED = """
import ctypes
import numba, torch
library = ctypes.CDLL
class Refusing:
    def __init__(self, *_): pass
    def syscall(self, *_): return -1
if REFUSE:
    ctypes.CDLL = Refusing
from minigen.kernels.cpu.amx.scratch import USE_TILES
ctypes.CDLL = library
from minigen.kernels.jit.code_cache import fingerprint
from tests.test_34_amx import digest
print(USE_TILES, fingerprint(), digest())
"""


_EMULATED = """
import numba, torch
from tests import emulated_tiles
emulated_tiles.install()
from tests.test_34_amx import USE_TILES, bits_of_products
print(USE_TILES, bits_of_products())
"""


def bits_of_products() -> str:
    """Return a digest of products of codes that tiles compute where there are any.

    37 groups are cut in parts; a group of weights lies far from 0, another holds a NaN.
    """
    found = hashlib.sha256()
    for form, num_tokens, columns in [("int4", 37, 37 * 32), ("int4", 48, 64), ("int8", 50, 96)]:
        rng = np.random.default_rng(num_tokens)
        numbers = rng.standard_normal((48, columns)).astype(np.float32)
        numbers[3, :32] = 1 + numbers[3, :32] / 1000
        numbers[20, 5] = np.nan
        data = torch.from_numpy(numbers).view(torch.uint8)
        weights = pack_layers([[StoredTensor("weight", "F32", numbers.shape, data)]], form)
        x = 3 * rng.standard_normal((num_tokens, columns)).astype(np.float32)
        x[::3] = np.abs(x[::3])
        out = product(form, weights, x, 48, True)
        assert np.isnan(out[:, 20]).all()
        found.update(np.delete(out, 20, axis=1).tobytes())
    return found.hexdigest()


@pytest.mark.skipif("avx512bw" not in FEATURES, reason="unpacking for tiles needs AVX-512")
def test_tiles_in_plain_code_give_the_bits_of_this_process() -> None:
    """So a processor without AMX tests what surrounds its instructions, too."""
    found = said_by(_EMULATED).split()
    assert found == ["True", bits_of_products()]


def digest() -> str:
    """Return the bits of products of codes, as this process computes them."""
    rng = np.random.default_rng(0)
    weights, x = packed(rng, "int4", (32, 64)), rng.standard_normal((40, 64)).astype(np.float32)
    return product("int4", weights, x, 32, False).tobytes().hex()


@pytest.mark.parametrize(
    "asked",
    [{"REFUSE": "1"}, {"NUMBA_CPU_NAME": "generic"}, AVX2_ALONE],
    ids=["the system refuses", "generic", "avx2"],
)
def test_without_tiles_the_bits_are_the_same_and_the_machine_code_another(
    asked: dict[str, str],
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"REFUSE = {'REFUSE' in asked}\n{_REFUSED}"],
        cwd=ROOT,
        env=os.environ | asked,
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    used, key, found = done.stdout.split()
    assert used == "False"
    assert found == digest()
    assert key != fingerprint() or not USE_TILES
