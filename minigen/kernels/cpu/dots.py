"""Dot products of four bytes or of two 16-bit numbers, lane by lane, on each kind of processor.

A lane has 32 bits. One operand's bytes are unsigned and the other's are signed, as `vpdpbusd`
wants them. Every way gives the same bits: whole numbers have exact sums, and pairs of bfloat16 are
added in the order of `vdpbf16ps` (which takes numbers below 2^-126 as 0).

`BYTE_DOTS` lists the ways, the fastest first, as `minigen.kernels.processor.NEEDS` does;
`fastest` chooses the one for a set of instructions. Codes of four bits allow shorter ways than all
256 values of a byte: sixteen products of them add up to no more than 16 bits, and they are the same
as signed and as unsigned numbers.

Sources: Intel's Intrinsics Guide for `vpdpbusd`, `vpmaddubsw`, `vpmaddwd` and `vdpbf16ps`; Arm's
Architecture Reference Manual for SDOT and USDOT.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from llvmlite.binding import initialize_native_asmparser

from minigen.kernels.cpu.arrays.aligned import NUM_LANES
from minigen.kernels.cpu.arrays.inputs import IN_PAIRS, UNPACKS_CODES
from minigen.kernels.cpu.simd import (
    FEATURES,
    FLOATS,
    I32,
    WORDS,
    BFloat,
    add_exact_product,
    call,
    same,
)
from minigen.kernels.processor import NEEDS, fastest_of

HALVES = ir.VectorType(ir.IntType(16), 2 * NUM_LANES)
_PMADDWD = {  # by their lanes
    16: "llvm.x86.avx512.pmaddw.d.512",
    8: "llvm.x86.avx2.pmadd.wd",
    4: "llvm.x86.sse2.pmadd.wd",
}
_PMADDUBSW = {8: "llvm.x86.avx2.pmadd.ub.sw", 4: "llvm.x86.ssse3.pmadd.ub.sw.128"}
FEW = 8  # vectors of codes up to 15: 8 x 2 x 15 x 128 is less than 2^15
IN_REGISTERS = 8  # sums at a time, of sixteen registers: the others hold codes and bytes
Emit = Callable[..., Any]
EmitCodes = Callable[[Any, list[Any], Sequence[int], Emit, Emit], list[Any]]


class ByteDots(NamedTuple):
    """A way to add dot products of bytes: its name, the instructions it needs, what it emits.

    `emit(builder, total, unsigned, signed)` takes any unsigned bytes. `emit_codes` is the same for
    a tile of tokens and bytes of at most 15: see `code_dots`.
    """

    name: str
    needs: frozenset[str]
    emit: Emit
    emit_codes: EmitCodes


def in_parts(builder: Any, width: int, operate: Emit, *vectors: Any) -> Any:
    """Apply an operation to every `width` lanes of some vectors of words, and join the results."""
    parts = []
    for first in range(0, NUM_LANES, width):
        lanes = ir.Constant(ir.VectorType(I32, width), list(range(first, first + width)))
        parts.append(operate(*(builder.shuffle_vector(each, each, lanes) for each in vectors)))
    return joined(builder, parts)


def joined(builder: Any, parts: list[Any]) -> Any:
    """Join vectors of words, whose number is a power of two, into one."""
    width = parts[0].type.count
    while len(parts) > 1:
        width *= 2
        both = ir.Constant(ir.VectorType(I32, width), list(range(width)))
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [builder.shuffle_vector(*pair, both) for pair in pairs]
    return parts[0]


def _vnni512(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    return call(builder, "llvm.x86.avx512.vpdpbusd.512", WORDS, [total, unsigned, signed])


def _vnni256(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    def dots(*parts: Any) -> Any:
        name = "llvm.x86.avx512.vpdpbusd.256"  # LLVM's name of AVX-VNNI's instruction, too
        return call(builder, name, parts[0].type, list(parts))

    return in_parts(builder, 8, dots, total, unsigned, signed)


def _pair_products(builder: Any, a: Any, b: Any, width: int) -> Any:
    """Multiply two vectors of 16-bit numbers with `vpmaddwd`, `width` lanes at a time."""

    def products(*parts: Any) -> Any:
        halves = ir.VectorType(ir.IntType(16), 2 * width)
        args = [builder.bitcast(each, halves) for each in parts]
        return call(builder, _PMADDWD[width], parts[0].type, args)

    return in_parts(builder, width, products, a, b)


def _widened(width: int) -> Emit:
    """Return what widens bytes to 16 bits first, because `vpmaddubsw` would saturate."""

    def emit(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
        eight = ir.Constant(HALVES, [8] * 2 * NUM_LANES)
        codes, numbers = (builder.bitcast(each, HALVES) for each in (unsigned, signed))
        even = [
            builder.and_(unsigned, same(0x00FF00FF)),
            builder.bitcast(builder.ashr(builder.shl(numbers, eight), eight), WORDS),
        ]
        odd = [
            builder.bitcast(builder.lshr(codes, eight), WORDS),
            builder.bitcast(builder.ashr(numbers, eight), WORDS),
        ]
        products = [_pair_products(builder, a, b, width) for a, b in (even, odd)]
        return builder.add(total, builder.add(*products))

    return emit


def _in_16_bits(width: int) -> EmitCodes:
    """Return what adds up in 16 bits first.

    `pmaddubsw` adds two products, and `paddw` those of all vectors. Each vector of codes is
    multiplied with every token's bytes before the next one is read. If there are more sums than
    `IN_REGISTERS`, they are computed some lanes after the others.
    """
    halves, in_bytes = (ir.VectorType(ir.IntType(8 * n), 4 * width // n) for n in (2, 1))
    words = ir.VectorType(I32, width)
    parts = [
        ir.Constant(words, list(range(first, first + width)))
        for first in range(0, NUM_LANES, width)
    ]

    def emit(
        builder: Any, totals: list[Any], order: Sequence[int], codes: Emit, signed: Emit
    ) -> list[Any]:
        assert len(order) <= FEW
        if len(totals) == 1:  # the order of reading is LLVM's
            codes, signed = _read_first(1, order, codes, signed)
        at_once = IN_REGISTERS // len(totals)
        sums: list[list[Any]] = [[] for _ in totals]
        for first in range(0, len(parts), at_once):
            found = sums_of(
                builder, len(totals), parts[first : first + at_once], order, codes, signed
            )
            for row, more in zip(sums, found, strict=True):
                row += more
        ones = ir.Constant(halves, [1] * 2 * width)
        return [
            builder.add(total, joined(builder, [fours(builder, twos, ones) for twos in row]))
            for total, row in zip(totals, sums, strict=True)
        ]

    def sums_of(
        builder: Any, tokens: int, lanes: list[Any], order: Sequence[int], codes: Emit, signed: Emit
    ) -> list[list[Any]]:
        sums: list[list[Any]] = [[None] * len(lanes) for _ in range(tokens)]
        for which in order:
            vector = codes(which)
            own = [part_of(builder, vector, part) for part in lanes]
            for token, row in enumerate(sums):
                number = signed(which, token)
                for at, part in enumerate(lanes):
                    args = [own[at], part_of(builder, number, part)]
                    twos = call(builder, _PMADDUBSW[width], halves, args)
                    added = twos if row[at] is None else builder.add(row[at], twos)
                    row[at] = in_order(builder, added) if tokens > 1 else added
        return sums

    def part_of(builder: Any, vector: Any, lanes: Any) -> Any:
        return builder.bitcast(builder.shuffle_vector(vector, vector, lanes), in_bytes)

    def fours(builder: Any, twos: Any, ones: Any) -> Any:
        return call(builder, _PMADDWD[width], words, [twos, ones])

    return emit


def in_order(builder: Any, vector: Any) -> Any:
    """Emit an assembly of no instruction that takes a vector and returns it.

    What is loaded after it in the program stays after it. Without it, LLVM would add up all of a
    token's products before the next token's, with all vectors of codes in memory for want of
    registers.
    """
    kind = ir.FunctionType(vector.type, [vector.type])
    return builder.asm(kind, "", "=v,0", [vector], side_effect=True)


def _read_first(tokens: int, order: Sequence[int], codes: Emit, signed: Emit) -> tuple[Emit, Emit]:
    """Emit all vectors at once; return functions that give them."""
    vectors = {which: codes(which) for which in sorted(order)}
    numbers = {which: [signed(which, token) for token in range(tokens)] for which in sorted(order)}
    return vectors.__getitem__, lambda which, token: numbers[which][token]


def _in_turn(emit: Emit) -> EmitCodes:
    """Return what emits dot products one after the other, a vector of codes for all tokens."""

    def in_turn(
        builder: Any, totals: list[Any], order: Sequence[int], codes: Emit, signed: Emit
    ) -> list[Any]:
        codes, signed = _read_first(len(totals), order, codes, signed)
        for which in order:
            totals = [
                emit(builder, total, codes(which), signed(which, token))
                for token, total in enumerate(totals)
            ]
        return totals

    return in_turn


def _neon(name: str) -> Emit:
    """Return what emits an instruction of Arm for four lanes at a time."""

    def emit(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
        def dots(sums: Any, *operands: Any) -> Any:
            in_bytes = ir.VectorType(ir.IntType(8), 16)
            args = [builder.bitcast(each, in_bytes) for each in operands]
            full = f"llvm.aarch64.neon.{name}.v4i32.v16i8"
            return call(builder, full, sums.type, [sums, *args])

        return in_parts(builder, 4, dots, total, unsigned, signed)

    return emit


_sdot, _usdot = _neon("sdot"), _neon("usdot")


def _dotprod(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """Take the unsigned bytes less 128, and add 128 x the sum of the signed ones.

    All lanes have the same signed bytes, so LLVM computes that sum once for all of a token's.
    """
    less = builder.xor(unsigned, same(-0x7F7F7F80))
    sums = _sdot(builder, same(0), same(0x01010101), signed)
    return _sdot(builder, builder.add(total, builder.shl(sums, same(7))), less, signed)


def _plain(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    for byte in range(4):
        code = builder.and_(builder.lshr(unsigned, same(8 * byte)), same(0xFF))
        number = builder.ashr(builder.shl(signed, same(24 - 8 * byte)), same(24))
        total = builder.add(total, builder.mul(code, number))
    return total


def _way(name: str, emit: Emit, emit_codes: EmitCodes | None = None) -> ByteDots:
    return ByteDots(name, frozenset(NEEDS[name].split()), emit, emit_codes or _in_turn(emit))


BYTE_DOTS = (
    _way("AVX-512 VNNI", _vnni512),
    _way("AVX-VNNI", _vnni256),
    _way("AVX2", _widened(8), _in_16_bits(8)),
    _way("NEON i8mm", _usdot, _in_turn(_sdot)),
    _way("NEON dotprod", _dotprod, _in_turn(_sdot)),
    _way("SSSE3", _widened(4), _in_16_bits(4)),
    _way("SSE2", _widened(4)),
    _way("plain vectors", _plain),
)


def fastest(features: Collection[str]) -> ByteDots:
    """Return the fastest way for these instructions, as LLVM names them, without a sign."""
    name = fastest_of(features)
    return next(way for way in BYTE_DOTS if way.name == name)


PAIR_PRODUCTS = {"avx512bw": 16, "avx2": 8, "x86-64": 4}  # what they need, and their lanes
PAIR_LANES = next((lanes for needed, lanes in PAIR_PRODUCTS.items() if needed in FEATURES), 0)
HAS_BFLOAT_DOTS = IN_PAIRS and "avx512bf16" in FEATURES
WAY = fastest(FEATURES)
if UNPACKS_CODES:
    initialize_native_asmparser()  # for `add_pair_product`


def byte_dot(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """Emit `total` + the dot products of unsigned bytes with signed bytes."""
    return WAY.emit(builder, total, unsigned, signed)


def code_dots(
    builder: Any, totals: list[Any], order: Sequence[int], codes: Emit, signed: Emit
) -> list[Any]:
    """Emit each token's total + the dot products of vectors of codes up to 15 with its bytes.

    `codes(which)` emits a vector, and `signed(which, token)` the bytes that a token has for it;
    `order` lists the vectors, at most `FEW`, as they lie in memory.
    """
    return WAY.emit_codes(builder, totals, order, codes, signed)


def pair_product(builder: Any, a: Any, b: Any) -> Any:
    """Emit the dot products of two vectors of signed 16-bit pairs."""
    if PAIR_LANES:
        return _pair_products(builder, a, b, PAIR_LANES)
    low = [builder.ashr(builder.shl(each, same(16)), same(16)) for each in (a, b)]
    high = [builder.ashr(each, same(16)) for each in (a, b)]
    return builder.add(builder.mul(*low), builder.mul(*high))


def add_pair_product(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """Emit `total` + the dot products of two vectors of signed 16-bit pairs, by `vpdpwssd`.

    Only where `UNPACKS_CODES` is true. LLVM would write two instructions for Intel, because each
    takes fewer cycles than the one; but what counts there is how many start.
    """
    kind = ir.FunctionType(WORDS, [WORDS] * 3)
    return builder.asm(kind, "vpdpwssd $3, $2, $0", "=v,0,v,v", [total, a, b], side_effect=False)


def bfloat_dot(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """Emit float32 `total` + the dot products of two vectors of bfloat16 pairs."""
    if HAS_BFLOAT_DOTS:
        pairs = ir.VectorType(BFloat(), 2 * NUM_LANES)
        args = [builder.bitcast(each, pairs) for each in (a, b)]
        return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, [total, *args])
    return float_dot(builder, total, a, *in_floats(builder, b))


def float_dot(builder: Any, total: Any, pairs: Any, first: Any, second: Any) -> Any:
    """Emit float32 `total` + the dot products of bfloat16 pairs with two vectors of float32.

    The upper halves come first, as in `vdpbf16ps`: if the floats are bfloat16 numbers, the bits of
    the sums are those of the instruction.
    """
    low, high = in_floats(builder, pairs)
    for half, number in ((high, second), (low, first)):
        total = add_exact_product(builder, half, number, total)
    return total


def in_floats(builder: Any, pairs: Any) -> list[Any]:
    """Emit the first and the second number of bfloat16 pairs as float32."""
    halves = builder.shl(pairs, same(16)), builder.and_(pairs, same(-65536))
    return [builder.bitcast(each, FLOATS) for each in halves]
