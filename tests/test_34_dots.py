"""Dot products of lanes: exact in every way that this processor has, and machine code for Arm."""

import platform
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from llvmlite import binding, ir
from numba import njit, typeof

from minigen import hardware
from minigen.kernels.cpu import dots, microkernels, simd
from minigen.kernels.cpu.arrays.inputs import quantized, rounded
from minigen.kernels.cpu.dots import BYTE_DOTS, ByteDots, fastest
from minigen.kernels.cpu.microkernels import AHEAD_EIGHT, AHEAD_FOUR, ONLY_FOUR, product_tile
from minigen.kernels.cpu.packed_weights import Codes4, Codes8, Pairs
from minigen.kernels.cpu.register_tiles import (
    EIGHT,
    FOUR,
    add_bfloat_dots,
    add_byte_dots,
    add_code_dots,
    pair_products,
    spread_numbers,
    store_tile,
    zeros,
)
from minigen.kernels.cpu.simd import WORDS, broadcast, load, same
from tests.processes import said_by

ARM = "aarch64-linux-gnu"
possible = pytest.mark.parametrize(
    "way",
    [
        pytest.param(
            way, marks=pytest.mark.skipif(not way.needs <= dots.FEATURES, reason="not here")
        )
        for way in BYTE_DOTS
    ],
    ids=[way.name for way in BYTE_DOTS],
)


def _byte_dots(codes, numbers, out):  # type: ignore[no-untyped-def]
    tile = spread_numbers(EIGHT, numbers, 0, 0)
    store_tile(out, 0, 16, add_byte_dots(tile, load(codes, 0), numbers, 0, 1))


def _code_dots(words, numbers, out):  # type: ignore[no-untyped-def]
    tile = spread_numbers(FOUR, numbers, 0, 0)
    store_tile(out, 0, 16, add_code_dots(tile, words, 0, numbers, 0, 8))


def _pair_products(pairs, numbers, out):  # type: ignore[no-untyped-def]
    store_tile(out, 0, 16, pair_products(EIGHT, load(pairs, 0), numbers, 0, 1))


def _bfloat_dots(pairs, numbers, out):  # type: ignore[no-untyped-def]
    store_tile(out, 0, 16, add_bfloat_dots(zeros(EIGHT), load(pairs, 0), numbers, 0, 1))


@possible
def test_dot_products_of_bytes_are_exact(way: ByteDots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dots, "WAY", way)
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (16, 4), np.uint8)
    numbers = rng.integers(-128, 128, (8, 4), np.int8)
    codes[:2], numbers[:2] = [[255] * 4, [0] * 4], [[-128] * 4, [127] * 4]  # the largest sums
    first = int(numbers.view(np.int32)[0, 0])
    found = np.zeros((8, 16), np.int32)
    njit(_byte_dots)(codes.view(np.int32).ravel(), numbers.view(np.int32).ravel(), found.ravel())
    expected = numbers.astype(np.int64) @ codes.astype(np.int64).T + first
    assert np.array_equal(found, expected.astype(np.int32))


@possible
def test_dot_products_of_four_bit_codes_are_exact(
    way: ByteDots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dots, "WAY", way)
    rng = np.random.default_rng(1)
    words = rng.integers(0, 256, (4, 16, 4), np.uint8)  # two codes a byte, four words a lane
    numbers = rng.integers(-128, 128, (4, 2, 4, 4), np.int8)  # tokens, halves, words, bytes
    words[:, 0], words[:, 1] = 255, 0
    numbers[0], numbers[1] = -128, 127  # the largest sums
    first = int(numbers.view(np.int32).ravel()[0])
    found = np.zeros((4, 16), np.int32)
    njit(_code_dots)(words.view(np.int32).ravel(), numbers.view(np.int32).ravel(), found.ravel())
    codes = np.stack([words & 15, words >> 4]).astype(np.int64)
    expected = np.einsum("thwb,hwlb->tl", numbers.astype(np.int64), codes) + first
    assert np.array_equal(found, expected.astype(np.int32))


@pytest.mark.parametrize("lanes_at_once", [16, 8, 4, 0])
def test_dot_products_of_pairs_are_exact(
    lanes_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dots, "PAIR_LANES", min(lanes_at_once, dots.PAIR_LANES))
    rng = np.random.default_rng(0)
    lanes = rng.integers(-(2**15), 2**15, (16, 2), np.int16)
    numbers = rng.integers(-(2**15) + 1, 2**15, (8, 2), np.int16)
    found = np.zeros((8, 16), np.int32)
    njit(_pair_products)(
        lanes.view(np.int32).ravel(), numbers.view(np.int32).ravel(), found.ravel()
    )
    assert np.array_equal(found, numbers.astype(np.int64) @ lanes.astype(np.int64).T)


@pytest.mark.parametrize("plain", [False, True], ids=["this processor's", "plain"])
def test_dot_products_of_bfloat16_pairs_keep_float32_sums(
    plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if plain:
        monkeypatch.setattr(dots, "HAS_BFLOAT_DOTS", False)
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randn(16, 2, generator=generator).bfloat16()
    numbers = torch.randn(8, 2, generator=generator).bfloat16()
    words = [each.view(torch.int32).numpy().ravel() for each in (pairs, numbers)]
    found = np.zeros((8, 16), np.float32)
    njit(_bfloat_dots)(*words, found.ravel())
    expected = numbers.double() @ pairs.double().T
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("features", "name"),
    [
        ("avx2 avx512f avx512vnni avxvnni", "AVX-512 VNNI"),
        ("avx2 avxvnni", "AVX-VNNI"),
        ("avx2 fma f16c", "AVX2"),
        ("neon dotprod i8mm bf16", "NEON i8mm"),
        ("neon dotprod", "NEON dotprod"),
        ("x86-64 ssse3 sse4.1", "SSSE3"),
        ("x86-64", "SSE2"),
        ("neon", "plain vectors"),
        ("", "plain vectors"),
    ],
)
def test_the_fastest_way_that_a_processor_has_is_chosen(features: str, name: str) -> None:
    assert fastest(features.split()).name == name


def assembly_of(text: str, triple: str, features: str) -> str:
    """Compile LLVM's language for another processor."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = binding.Target.from_triple(triple)
    machine = target.create_target_machine(features=features, opt=3)
    assembly: str = machine.emit_assembly(binding.parse_assembly(text))
    return assembly


def instructions_of(assembly: str) -> Counter[str]:
    """Return how often assembly has each instruction."""
    return Counter(re.findall(r"^\t(?:\{vex\}\s+)?([a-z]\w*)", assembly, re.MULTILINE))


def machine_code(text: str, triple: str, features: str) -> Counter[str]:
    """Compile LLVM's language for another processor; return how often it has each instruction."""
    return instructions_of(assembly_of(text, triple, features))


@pytest.mark.parametrize(
    ("name", "as_codes", "expected"),
    [
        ("AVX-512 VNNI", False, {"vpdpbusd": 1}),
        ("AVX-VNNI", False, {"vpdpbusd": 2}),
        ("AVX2", False, {"vpmaddwd": 4, "vpaddd": 4}),
        ("SSE2", False, {"pmaddwd": 8, "paddd": 8}),
        ("AVX2", True, {"vpmaddubsw": 4, "vpaddw": 2, "vpmaddwd": 2, "vpaddd": 2}),
        ("SSSE3", True, {"pmaddubsw": 8, "paddw": 4, "pmaddwd": 4, "paddd": 4}),
        ("NEON i8mm", False, {"usdot": 4}),
        ("NEON i8mm", True, {"sdot": 8}),
        ("NEON dotprod", False, {"sdot": 8}),
        ("NEON dotprod", True, {"sdot": 8}),
    ],
)
def test_a_vector_of_products_takes_these_instructions(
    name: str, as_codes: bool, expected: dict[str, int]
) -> None:
    """As codes they are two vectors."""
    (way,) = (each for each in BYTE_DOTS if each.name == name)
    module = ir.Module()
    kind = ir.FunctionType(ir.VoidType(), [WORDS.as_pointer()] * 3)
    function = ir.Function(module, kind, "dots")
    builder = ir.IRBuilder(function.append_basic_block())
    total, unsigned, signed = (builder.load(each) for each in function.args)
    if as_codes:
        other = builder.lshr(unsigned, same(4))
        codes, numbers = (unsigned, other), (signed, total)
        (found,) = way.emit_codes(
            builder, [total], (0, 1), codes.__getitem__, lambda which, token: numbers[which]
        )
    else:
        found = way.emit(builder, total, unsigned, signed)
    builder.store(found, function.args[0])
    builder.ret_void()
    triple = ARM if "NEON" in name else "x86_64-linux-gnu"
    needed = {*way.needs, "avx512f"} if "512" in name else way.needs - {"x86-64"}
    counts = machine_code(str(module), triple, ",".join(f"+{each}" for each in needed))
    assert {each: counts[each] for each in expected} == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # eight vectors of two registers: codes once, then each of four tokens' numbers
        ("AVX2", {"vpmaddubsw": 64, "vpbroadcastd": 32, "reads": 16, "kept": 0}),
        # in two halves, each with all numbers; the first one's sums wait in memory, and `totals`
        ("SSSE3", {"pmaddubsw": 128, "pshufd": 64, "reads": 32, "kept": 9}),
    ],
)
def test_a_tile_of_four_tokens_keeps_its_sums_in_registers(
    name: str, expected: dict[str, int]
) -> None:
    (way,) = (each for each in BYTE_DOTS if each.name == name)
    module = ir.Module()
    words, numbers = WORDS.as_pointer(), ir.IntType(32).as_pointer()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [words, words, numbers]), "dots")
    builder = ir.IRBuilder(function.append_basic_block())
    out, codes, bytes_of = function.args

    def vector(which: int) -> Any:
        return builder.load(builder.gep(codes, [ir.IntType(64)(which)]), align=4)

    def number(which: int, token: int) -> Any:
        return broadcast(
            builder, builder.load(builder.gep(bytes_of, [ir.IntType(64)(8 * token + which)]))
        )

    rows = way.emit_codes(builder, [same(0)] * 4, range(8), vector, number)
    for token, row in enumerate(rows):
        builder.store(row, builder.gep(out, [ir.IntType(64)(token)]), align=4)
    builder.ret_void()
    features = ",".join(f"+{each}" for each in way.needs)
    text = assembly_of(str(module), "x86_64-linux-gnu", features)
    counts = instructions_of(text)
    counts["reads"] = len(re.findall(r"\tv?movdq[ua]\s+-?\d*\(%rsi\)", text))
    counts["kept"] = len(re.findall(r"%[xy]mm\d+, -?\d*\(%rsp\)", text))
    assert {each: counts[each] for each in expected} == expected


def _product(weights, inputs, pairs, out):  # type: ignore[no-untyped-def]
    store_tile(out, 0, 16, product_tile(FOUR, weights, 0, 0, inputs, 0, 2, pairs, 0, 1))


def arm_products(form: str, name: str) -> str:
    """Compile a product's tile for Arm; return how often it has SDOT and USDOT.

    This changes the process for good: Numba keeps the compiled parts of the product. While it
    compiles, Arm's instructions have names of functions, which this processor's compiler accepts.
    """
    real = dots.call

    def call(builder, name, result, args):  # type: ignore[no-untyped-def]
        other = name.replace(".", "_") if "aarch64" in name else name
        binding.add_symbol(other, 1)  # never called
        return real(builder, other, result, args)

    dots.call = call
    (dots.WAY,) = (each for each in BYTE_DOTS if each.name == name)
    dots.PAIR_LANES, microkernels.UNPACKS_CODES = 0, False
    words = {"int4": Codes4, "int8": Codes8}[form](np.zeros((1, 2 * 136), np.int32))
    pairs, out = np.zeros(32, np.int32), np.zeros(64, np.float32)
    product = simd.kernel(_product)
    product.compile(tuple(map(typeof, (words, quantized(4, 64), pairs, out))))
    (text,) = product.inspect_llvm().values()
    text = re.sub(r"@(llvm_aarch64\w+)", lambda found: "@" + found[1].replace("_", "."), text)
    text = re.sub(r"^target .*", "", text, flags=re.MULTILINE)
    features = ",".join(f"+{each}" for each in (*dots.WAY.needs, "fullfp16"))
    found = machine_code(text, ARM, features)
    return f"{found['sdot']} sdot, {found['usdot']} usdot"


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="pretends another one")
@pytest.mark.parametrize(
    ("form", "name", "expected"),
    [
        # four tokens x four parts of a register x lower and upper codes of four words
        ("int4", "NEON i8mm", "128 sdot, 0 usdot"),
        ("int4", "NEON dotprod", "128 sdot, 0 usdot"),
        # the same for one word of codes; without i8mm, a sum of the inputs for each token, too
        ("int8", "NEON i8mm", "0 sdot, 16 usdot"),
        ("int8", "NEON dotprod", "20 sdot, 0 usdot"),
    ],
)
def test_the_inner_loop_of_a_product_takes_arms_dot_products(
    form: str, name: str, expected: str
) -> None:
    code = f"from tests.test_34_dots import arm_products; print(arm_products({form!r}, {name!r}))"
    assert said_by(code) == expected


@pytest.mark.parametrize("kind", [Codes4, Codes8, Pairs])
@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(AHEAD_FOUR, True), (AHEAD_EIGHT, True), (FOUR, False), (EIGHT, False), (ONLY_FOUR, False)],
)
def test_tiles_that_look_ahead_prefetch_and_others_do_not(
    tokens: tuple[float, ...], expected: bool, kind: type
) -> None:
    @simd.kernel
    def product(weights, inputs, pairs, out):  # type: ignore[no-untyped-def]
        store_tile(out, 0, 16, product_tile(tokens, weights, 0, 0, inputs, 0, 2, pairs, 0, 1))

    weights = kind(np.zeros((1, 2 * 256), np.int32))
    inputs = (rounded if kind is Pairs else quantized)(8, 64)
    pairs, out = np.zeros(32, np.int32), np.zeros(128, np.float32)
    product.compile(tuple(map(typeof, (weights, inputs, pairs, out))))
    (assembly,) = product.inspect_asm().values()
    assert bool(re.search(r"^\t(prefetch|prfm)", assembly, re.MULTILINE)) == expected


@pytest.mark.parametrize(
    ("features", "name"),
    [
        ("+avx2,+fma,+f16c", "AVX2"),
        ("+avx2,+fma,+f16c,+avxvnni", "AVX-VNNI"),
        ("+ssse3", "SSSE3"),
        ("", "SSE2"),  # only LLVM knows what its haswell has
    ],
)
def test_a_pretended_processor_uses_its_own_instructions(features: str, name: str) -> None:
    code = "from minigen.kernels.cpu.amx.scratch import instructions; print(instructions())"
    said = said_by(code, NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES=features)
    assert said == name


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"NUMBA_CPU_NAME": "generic"},
        {"NUMBA_CPU_NAME": "haswell"},
        {"NUMBA_CPU_NAME": "sandybridge"},
        {"NUMBA_CPU_FEATURES": "+avx2,+fma"},
        {"NUMBA_CPU_FEATURES": ""},
        {"NUMBA_ENABLE_AVX": "0"},
        {"NUMBA_ENABLE_AVX": "1", "NUMBA_CPU_NAME": "ivybridge"},
    ],
    ids=str,
)
def test_the_instructions_are_known_without_numba(variables: dict[str, str]) -> None:
    """Else stored machine code would be looked for under another name than it has."""
    code = """
import sys
from minigen.kernels import processor
found = processor.cpu_name(), processor.target_features()
assert "numba" not in sys.modules
from numba import config
from llvmlite.binding import get_host_cpu_name
from minigen.kernels.cpu import simd
print(found == (config.CPU_NAME or get_host_cpu_name(), simd.compiled_features()))
"""
    assert said_by(code, **variables) == "True"


def test_numba_compiles_for_what_the_system_knows_of_an_arm_processor() -> None:
    """The name stands for one that LLVM does not report; no function of these modules uses it."""
    code = """
from minigen import hardware
hardware.arm_features = lambda: frozenset({"widekl"})
from minigen.kernels.cpu import step
from numba.core.registry import cpu_target
from minigen.kernels.cpu.simd import FEATURES
print("widekl" in FEATURES, cpu_target.target_context.codegen()._tm_features.endswith("+widekl"))
"""
    assert said_by(code) == "True True"
    assert said_by(code, NUMBA_CPU_FEATURES="+sse2") == "False False", "a request is obeyed"
    late = "from numba import njit; njit(lambda: 0)" + code
    assert said_by(late) == "False False", "it is too late"


CPUINFO = "Features\t: fp asimd aes crc32 atomics {}\nCPU implementer\t: 0x41\n"


@pytest.mark.parametrize(
    ("system", "said", "expected"),
    [
        ("Linux", CPUINFO.format("asimddp i8mm"), {"neon", "dotprod", "i8mm"}),
        ("Linux", CPUINFO.format("asimddp"), {"neon", "dotprod"}),
        ("Linux", CPUINFO.format(""), {"neon"}),
        ("Darwin", "FEAT_DotProd", {"neon", "dotprod"}),
        ("Windows", "", {"neon"}),
    ],
)
def test_the_system_says_what_an_arm_processor_has(
    system: str, said: str, expected: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(said, "utf-8")
    monkeypatch.setattr(hardware, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(platform, "system", lambda: system)
    if system == "Darwin":
        monkeypatch.setattr(hardware, "_system_number", lambda name: int(name.endswith(said)))
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert hardware.arm_features() == expected
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert hardware.arm_features() == frozenset()
