"""Kernels on other processors: equal bits without an instruction, and no missing functions."""

import hashlib
import json
import math
import os
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from numba import njit, typeof

from minigen.kernels.cpu import simd
from minigen.kernels.cpu.arrays.inputs import UNPACKED, quantized
from minigen.kernels.cpu.attention import Rows
from minigen.kernels.cpu.kv import bf16
from minigen.kernels.cpu.kv.layout import PackedKVPool, Shape, make_scratch, words_of_tile
from minigen.kernels.cpu.microkernels import SIX, product_of_two
from minigen.kernels.cpu.packed_weights import pack_layers
from minigen.kernels.cpu.register_tiles import (
    EIGHT,
    ONE,
    add_bfloat_dots,
    add_byte_dots,
    add_code_dots,
    pair_products,
    spread_numbers,
    store_tile,
    zeros,
)
from minigen.kernels.cpu.simd import (
    FEATURES,
    float16_of,
    fused,
    kernel,
    load,
    load_float16,
    store,
    store_bfloat16,
)
from minigen.kernels.panel_linear import panel_linear
from minigen.kernels.processor import IS_X86
from tests.processes import said_by
from tests.test_34_cpu_kernels import stored
from tools.chapters import ROOT


def _widen(halves, out):  # type: ignore[no-untyped-def]
    for index in range(0, len(halves), 16):
        store(out, index, load_float16(halves, index))


def _widen_each(halves, out):  # type: ignore[no-untyped-def]
    for index in range(len(halves)):
        out[index] = float16_of(halves[index])


def _narrow(numbers, out):  # type: ignore[no-untyped-def]
    for index in range(0, len(numbers), 16):
        store_bfloat16(out, index, load(numbers, index))


def _fuse(a, b, c, out):  # type: ignore[no-untyped-def]
    for index in range(0, len(a), 16):
        store(out, index, fused(load(a, index), load(b, index), load(c, index)))


def _bfloat_dots(pairs, others, num_others, out):  # type: ignore[no-untyped-def]
    for index in range(0, len(pairs), 16):
        tile = zeros(ONE)
        for other in range(num_others):
            tile = add_bfloat_dots(tile, load(pairs, index), others, other, 0)
        store_tile(out, index, 0, tile)


def _whole_dots(words, others, out):  # type: ignore[no-untyped-def]
    for index in range(0, len(words), 16):
        tile = spread_numbers(ONE, others, 0, 0)
        for other in range(len(others)):
            tile = add_byte_dots(tile, load(words, index), others, other, 0)
        tile = add_code_dots(tile, words, index % 512, others, 0, 0)
        store_tile(out, index, 0, tile)
        store_tile(out, len(words) + index, 0, pair_products(ONE, load(words, index), others, 1, 0))


def _hard_numbers() -> np.ndarray:
    """Return numbers of any bits, also numbers between two bfloat16 values or at their middle."""
    upper = np.arange(2**16, dtype=np.uint32) << 16
    lower = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
    anything = np.random.default_rng(0).integers(0, 2**32, 2**16, dtype=np.uint32)
    return np.concatenate([anything, *(upper | each for each in lower)]).view(np.float32)


def digest() -> str:
    """Return a digest of the kernels' conversions and dot products, as compiled in this process."""
    numbers, rng = _hard_numbers(), np.random.default_rng(1)
    widened, narrowed = np.empty(2**16, np.float32), np.empty(len(numbers), np.uint16)
    njit(_widen)(np.arange(2**16, dtype=np.uint16), widened)
    njit(_narrow)(numbers, narrowed)
    pairs = torch.from_numpy(rng.standard_normal((1024, 2), dtype=np.float32)).bfloat16()
    words, others = pairs.view(torch.int32).numpy().ravel(), rng.integers(-128, 128, (64, 4))
    sums, wholes = np.empty(1024, np.float32), np.empty(2048, np.int32)
    njit(_bfloat_dots)(words, words[:64].copy(), 64, sums)
    njit(_whole_dots)(words, others.astype(np.int8).view(np.int32).ravel(), wholes)
    found = hashlib.sha256()
    for each in (np.nan_to_num(widened), narrowed[~np.isnan(numbers)], sums, wholes):
        found.update(each.tobytes())
    return found.hexdigest()


def test_pairs_and_floats_of_bfloat16_numbers_are_rounded_and_multiplied_alike() -> None:
    numbers = _hard_numbers()
    halves, floats = np.empty(len(numbers), np.uint16), np.empty(len(numbers), np.float32)
    narrow = njit(_narrow)
    narrow(numbers, halves)
    narrow(numbers, floats)
    assert np.array_equal(floats.view(np.uint32), halves.astype(np.uint32) << 16)
    rng = np.random.default_rng(2)
    some, others = (rng.standard_normal(size, np.float32) for size in (2048, 128))
    pairs, other_pairs = (np.empty(size, np.uint16) for size in (2048, 128))
    rounded, sums = np.empty(128, np.float32), np.empty((2, 1024), np.float32)
    narrow(some, pairs)
    narrow(others, other_pairs)
    narrow(others, rounded)
    dots = njit(_bfloat_dots)
    dots(pairs.view(np.int32), other_pairs.view(np.int32), 64, sums[0])
    dots(pairs.view(np.int32), rounded, 64, sums[1])
    assert np.array_equal(*sums)
    assert np.ptp(sums) > 1


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("generic", None),
        ("tremont", "+sse3,+ssse3,+sse4.1,+sse4.2"),  # laptops without AVX
        ("haswell", "+avx2,+fma,+f16c"),  # found in most computers
        ("haswell", "+avx2,+fma,+f16c,+avxvnni"),
        ("skylake-avx512", "+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512dq,+avx512vl"),
    ],
)
def test_kernels_give_the_same_bits_on_every_processor(name: str, features: str | None) -> None:
    """NUMBA_CPU_NAME selects one; an instruction that this machine lacks would end the process."""
    if not set((features or "").replace("+", "").split(",")) <= {"", *FEATURES}:
        pytest.skip("this machine lacks instructions of that processor")
    asked = {"NUMBA_CPU_NAME": name}
    if features is not None:
        asked["NUMBA_CPU_FEATURES"] = features
    code = "from tests.test_34_processors import digest; print(digest())"
    assert said_by(code, **asked) == digest()


def digest_of_products() -> str:
    """Return a digest of products of all widths of tiles with packed weights."""
    rng = np.random.default_rng(0)
    weight = stored("F32", rng.standard_normal((48, 96), np.float32))  # three panels
    x, found = torch.from_numpy(rng.standard_normal((77, 96), np.float32)), hashlib.sha256()
    for form in ("int4", "int8", "bfloat16"):
        linear = panel_linear(form, 1)([weight], [])
        for num_tokens in (1, 2, 3, 4, 5, 7, 16, 30, 77):
            found.update(linear(x[:num_tokens]).numpy().tobytes())
    return found.hexdigest()


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("tremont", "+sse3,+ssse3,+sse4.1,+sse4.2"),
        ("haswell", "+avx2,+fma,+f16c"),
        # Intel's processors with AVX-512 before AMX, whose panels are unpacked once for all tokens
        ("cascadelake", "+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512vnni"),
    ],
)
def test_products_give_the_same_bits_on_every_processor(name: str, features: str) -> None:
    if not set(features.replace("+", "").split(",")) <= set(FEATURES):
        pytest.skip("this machine lacks instructions of that processor")
    code = "from tests.test_34_processors import digest_of_products as digest; print(digest())"
    assert said_by(code, NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES=features) == digest_of_products()


def _score(cache, shape, rows, scratch):  # type: ignore[no-untyped-def]
    _scores(cache, EIGHT, shape, 0, 2, 1, rows, 0, scratch, 0, 0)


def _add_values(cache, shape, rows, scratch, acc):  # type: ignore[no-untyped-def]
    _sums(cache, EIGHT, shape, 0, 2, 20, rows, 0, scratch, 0, acc)


_scores = njit(inline="always")(bf16.score)
_sums = njit(inline="always")(bf16.accumulate_values)


def on_the_stack() -> str:
    """Return how often each loop of attention's products for eight rows uses the stack."""
    shape = Shape(1, 64, 2, 1, 64, 64, 32, 16, 4, words_of_tile(64, "bfloat16"), np.float32(1e-5))
    cache, scratch = PackedKVPool(shape, "bfloat16").cache, make_scratch(shape, 16, 1, "bfloat16")
    rows = Rows(0, 8, 0, 0, 8, 8, np.arange(1, 4))
    found = []
    for function, more in ((_score, ()), (_add_values, (np.zeros(640, np.float32),))):
        compiled = kernel(function)
        compiled.compile(tuple(map(typeof, (cache, shape, rows, scratch, *more))))
        (text,) = compiled.inspect_asm().values()
        for block in re.split(r"^\.\w+:", text, flags=re.MULTILINE):
            if "vfmadd" in block:
                found.append(len(re.findall(r"mm\d+.*\(%rsp\)|\(%rsp\).*mm\d+", block)))
    return f"{len(found)} loops, {sum(found)} times"


@pytest.mark.skipif(not IS_X86, reason="pretends a processor with AVX2")
def test_with_avx2_attention_keeps_its_sums_in_registers() -> None:
    """The code is read, and never run."""
    code = "from tests.test_34_processors import on_the_stack; print(on_the_stack())"
    asked = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+f16c"}
    assert said_by(code, **asked) == "4 loops, 0 times"


def _two_panels(weights, inputs, unpacked, out):  # type: ignore[no-untyped-def]
    both = product_of_two(SIX, weights, 0, 0, inputs, 0, 3, unpacked, 0, 1)
    store_tile(out, 0, 32, both[0])
    store_tile(out, 16, 32, both[1])


def loops_of_two_panels() -> str:
    """Return how many dot products, broadcasts and uses of the stack six tokens' loop has, as JSON.

    There are three numbers for each form.
    """
    weight, out, said = stored("F32", np.ones((32, 96), np.float32)), np.zeros(192, np.float32), []
    unpacked = np.zeros(6 * UNPACKED, np.int32)
    for form in ("int4", "int8"):
        compiled = kernel(_two_panels)
        given = (pack_layers([[weight]], form), quantized(6, 96), unpacked, out)
        compiled.compile(tuple(map(typeof, given)))
        (text,) = compiled.inspect_asm().values()
        (loop,) = (each for each in re.split(r"^\.\w+:", text, flags=re.MULTILINE) if DOT in each)
        found = (DOT, "vpbroadcastd|to16", r"mm\d+.*\(%rsp\)|\(%rsp\).*mm\d+")
        said.append([len(re.findall(each, loop)) for each in found])
    return json.dumps(said)


DOT = "vpdpbusd"
INTEL = "+avx,+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512vnni,+avx512bf16"


@pytest.mark.skipif(not IS_X86, reason="pretends a processor with AVX-512")
def test_two_panels_share_what_they_load_of_the_inputs() -> None:
    """Eight words of six tokens are loaded once for both panels, and the sums stay in registers.

    The code is read, and never run. Of 150 operands some totals may lie on the stack.
    """
    code = "from tests.test_34_processors import loops_of_two_panels as loops; print(loops())"
    found = said_by(code, NUMBA_CPU_NAME="emeraldrapids", NUMBA_CPU_FEATURES=INTEL)
    for dots, broadcasts, on_stack in json.loads(found):
        assert dots == 2 * 8 * 6
        assert broadcasts < 8 * 6 + 12  # those of the words, and of what a group has beside them
        assert on_stack < 10


@pytest.mark.skipif(not IS_X86, reason="pretends processors with AVX-512")
@pytest.mark.parametrize(("name", "fast"), [("znver4", "True"), ("emeraldrapids", "False")])
def test_pairs_of_bfloat16_are_multiplied_by_an_instruction_where_it_is_fast(
    name: str, fast: str
) -> None:
    code = "from minigen.kernels.cpu.arrays.inputs import IN_PAIRS; print(IN_PAIRS)"
    assert said_by(code, NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES=INTEL) == fast


@pytest.mark.parametrize("instruction", [True, False])
def test_a_fused_multiply_add_is_rounded_once(
    instruction: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simd, "HAS_FMA", instruction)  # without it, LLVM calls libm's fmaf
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, (3, 2**16), np.uint32)
    bits[:, 2**14 :] = bits[:, 2**14 :] & 0x8FFFFFFF | 0x38000000  # of sizes that meet each other
    a, b, c = bits.view(np.float32)
    near = slice(2**15, None)  # sums that float64 rounds to the middle between two of float32
    signs = rng.choice([np.float32(-1), np.float32(1)], (2, 2**15))
    a[near] = signs[0] * np.float32(2**-24) * np.float32(1 + 2**-23)
    b[near] = np.float32(1 - 2**-23)
    c[near] = signs[1] * (1 + rng.integers(0, 2**20, 2**15) * 2.0**-23).astype(np.float32)
    small = slice(2**14, 2**15)  # the same where float32 has fewer bits: below 2^-126
    a[small] = rng.choice([-1, 1], 2**14) * np.ldexp(np.float32(1 + 2**-23), -75)
    b[small] = np.ldexp(np.float32(1 - 2**-23), -75)
    c[small] = np.ldexp(rng.integers(-(2**23), 2**23, 2**14), -149)
    a[:3], b[0], c[1] = (np.inf, np.nan, -np.inf), 0, np.inf
    found = np.empty(len(a), np.float32)
    njit(_fuse)(a, b, c, found)
    expected = np.array([_fused_exactly(*each) for each in zip(a, b, c, strict=True)], np.float32)
    np.testing.assert_array_equal(
        found.view(np.int32)[~np.isnan(expected)], expected.view(np.int32)[~np.isnan(expected)]
    )
    assert np.array_equal(np.isnan(found), np.isnan(expected))


def _fused_exactly(a: np.float32, b: np.float32, c: np.float32) -> float:
    """Return a * b + c by fractions, rounded once to float32, ties to even."""
    if not all(map(math.isfinite, (a, b, c))):
        with np.errstate(invalid="ignore"):
            return float(np.float64(a) * np.float64(b) + np.float64(c))
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    if exact == 0:
        return float(np.float64(a) * np.float64(b) + np.float64(c))  # its sign
    exponent = max(math.frexp(float(abs(exact)))[1] - 24, -149)
    rounded = round(exact / Fraction(2) ** exponent) * Fraction(2) ** exponent  # ties to even
    return math.copysign(math.inf, exact) if abs(rounded) >= 2**128 else float(rounded)


@pytest.mark.parametrize("widen", [_widen, _widen_each])
@pytest.mark.parametrize("instruction", [True, False])
def test_every_float16_number_is_widened_exactly(
    widen: object, instruction: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simd, "HAS_FLOAT16", simd.HAS_FLOAT16 and instruction)
    halves = np.arange(2**16, dtype=np.uint16)
    found = np.empty(len(halves), np.float32)
    njit(widen)(halves, found)
    np.testing.assert_array_equal(found, halves.view(np.float16).astype(np.float32))


@pytest.mark.parametrize("instruction", [True, False])
def test_rounding_to_bfloat16_is_torchs_except_for_the_smallest(
    instruction: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simd, "HAS_BFLOAT16", simd.HAS_BFLOAT16 and instruction)
    numbers = _hard_numbers()
    found = np.empty(len(numbers), np.uint16)
    njit(_narrow)(numbers, found)
    normal = np.abs(numbers) >= np.finfo(np.float32).tiny
    expected = torch.from_numpy(np.where(normal | np.isnan(numbers), numbers, 0)).bfloat16()
    made = torch.from_numpy(found.view(np.int16)).view(torch.bfloat16)
    torch.testing.assert_close(made, expected, rtol=0, atol=0, equal_nan=True)


_GENERATE = """
import sys
from minigen import LLM, SamplingParams
llm = LLM.load(sys.argv[1], weights="bfloat16", kv_cache_memory=2**20)
print(llm.generate("abc", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)).token_ids)
print(llm.describe()["linear"])
"""


def test_bfloat16_runs_where_onednn_refuses_it(tiny_directory: Path) -> None:
    """On a processor with AVX2 only, nothing can be packed, so the plain product runs."""
    done = subprocess.run(
        [sys.executable, "-c", _GENERATE, str(tiny_directory)],
        cwd=ROOT,
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"},
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1] == "torch"
