"""Answers to the exercises of chapter 13."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.answers import Answers

Encode = Callable[[Tensor, int], Tensor]


def distance_by_loops(encode: Encode, head_dim: int) -> bool:
    """Right, one pair of positions at a time."""
    query, key = torch.randn(head_dim), torch.randn(head_dim)
    for distance in range(64):
        scores = [
            float(encode(query, key_at + distance) @ encode(key, key_at))
            for key_at in range(64 - distance)
        ]
        if max(scores) - min(scores) > 0.01:
            return False
    return True


def distance_by_shifts(encode: Encode, head_dim: int) -> Tensor:
    """Right, with several queries and keys, and each shift beside no shift; returns a tensor."""
    queries, keys = torch.randn(2, 3, head_dim)
    at = torch.arange(64)
    q = torch.stack([torch.stack([encode(each, m) for m in at.tolist()]) for each in queries])
    k = torch.stack([torch.stack([encode(each, n) for n in at.tolist()]) for each in keys])
    scores = torch.einsum("amd,bnd->abmn", q, k)
    moved = [
        (scores[..., by:, by:] - scores[..., : 64 - by, : 64 - by]).abs().max()
        for by in range(1, 64)
    ]
    return torch.stack(moved).max() < 0.01


def wrong_distance(name: str) -> Callable[[Encode, int], object]:
    def part(encode: Encode, head_dim: int) -> object:
        torch.manual_seed(13)
        query, key = torch.randn(head_dim), torch.randn(head_dim)
        q = torch.stack([encode(query, m) for m in range(64)])
        k = torch.stack([encode(key, n) for n in range(64)])
        if name == "only the query is encoded":
            k = key.expand(64, -1)
        if name == "new vectors at each position":
            q = torch.stack([encode(torch.randn(head_dim), m) for m in range(64)])
        if name == "cosines":
            q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
        scores = q @ k.T
        match name:
            case "always":
                return True
            case "never":
                return False
            case "nothing returned":
                return None
            case "the scores":
                return scores
            case "turned round":
                return not torch.allclose(scores[1:, 1:], scores[:-1, :-1], rtol=0, atol=0.01)
            case "equal to the bit":
                return torch.equal(scores[1:, 1:], scores[:-1, :-1])
            case "distance 0 only":
                same = scores.diagonal()
                return torch.allclose(same, same[:1].expand(64), rtol=0, atol=0.01)
            case "one far shift only":
                return torch.allclose(scores[32:, 32:], scores[:-32, :-32], rtol=0, atol=0.01)
            case "even shifts only":
                return torch.allclose(scores[2:, 2:], scores[:-2, :-2], rtol=0, atol=0.01)
            case "the query moves alone":
                return torch.allclose(scores[1:], scores[:-1], rtol=0, atol=0.01)
            case "a symmetry":
                return torch.allclose(scores, scores.T, rtol=0, atol=0.01)
            case "lengths":
                sizes = q.norm(dim=-1)
                return torch.allclose(sizes, sizes[:1].expand(64), rtol=0, atol=0.01)
            case "too patient":
                return torch.allclose(scores[1:, 1:], scores[:-1, :-1], rtol=0, atol=5.0)
            case "first positions only":
                return torch.allclose(scores[1:9, 1:9], scores[:8, :8], rtol=0, atol=0.01)
        return torch.allclose(scores[1:, 1:], scores[:-1, :-1], rtol=0, atol=0.01)

    return part


WRONG_DISTANCES = [
    *("only the query is encoded", "new vectors at each position", "cosines", "always", "never"),
    *("nothing returned", "the scores", "turned round", "equal to the bit", "distance 0 only"),
    *("one far shift only", "even shifts only", "the query moves alone", "a symmetry", "lengths"),
    *("too patient", "first positions only"),
]


def rms_norm_of_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Right, by the library."""
    return functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)


def rms_norm_by_norms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Right, from the length of each row."""
    wide = x.double()
    size = (wide.norm(dim=-1, keepdim=True) ** 2 / x.shape[-1] + eps) ** 0.5
    return (wide / size * weight).to(x.dtype)


def wrong_rms_norm(name: str) -> Callable[[Tensor, Tensor, float], Tensor]:
    def part(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x if name in ("in its own type", "in place") else x.float()
        square = wide.square().mean(-1, keepdim=True)
        if name == "layer norm":
            wide = wide - wide.mean(-1, keepdim=True)
            square = wide.square().mean(-1, keepdim=True)
        if name == "sum":
            square = wide.square().sum(-1, keepdim=True)
        if name == "all rows together":
            square = wide.square().mean()
        if name == "down the columns":
            square = wide.square().mean(0, keepdim=True)
        if name == "mean of sizes":
            square = wide.abs().mean(-1, keepdim=True) ** 2
        size = (square + eps).sqrt()
        if name == "eps outside":
            size = square.sqrt() + eps
        if name == "no eps":
            size = square.sqrt()
        if name == "no root":
            size = square + eps
        if name == "in place":
            return x.div_(size) * weight
        normed = wide / size
        if name == "float32 stays":
            return weight.float() * normed
        if name == "no weight":
            return normed.to(x.dtype)
        if name == "one plus weight":
            return (normed * (1 + weight)).to(x.dtype)
        return weight * normed.to(x.dtype)

    return part


WRONG_RMS_NORM = [
    *("in its own type", "in place", "layer norm", "sum", "all rows together"),
    *("down the columns", "mean of sizes", "eps outside", "no eps", "no root"),
    *("float32 stays", "no weight", "one plus weight"),
]


def rotary_by_complex_numbers(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Right, as numbers of the complex plane."""
    turned = torch.complex(*x.float().chunk(2, dim=-1)) * torch.complex(cos, sin)[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)


def rotary_by_rotated_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Right, the way transformers writes it."""
    wide, half = x.float(), x.shape[-1] // 2
    swapped = torch.cat([-wide[..., half:], wide[..., :half]], dim=-1)
    cos, sin = torch.cat([cos, cos], -1)[:, None], torch.cat([sin, sin], -1)[:, None]
    return (wide * cos + swapped * sin).to(x.dtype)


def wrong_rotary(name: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def part(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        wide = x if name in ("rounded between", "in place") else x.float()
        if name == "rounded between":
            cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        if name == "angles of the first token":
            c, s = c[:1], s[:1]
        if name == "one angle for all pairs":
            c, s = c[..., :1], s[..., :1]
        if name == "the axis at the wrong place":
            c, s = cos.unsqueeze(0), sin.unsqueeze(0)
        if name == "backwards":
            s = -s
        a, b = wide.chunk(2, dim=-1)
        if name == "neighbours":
            a, b = wide[..., 0::2], wide[..., 1::2]
            return torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2).to(x.dtype)
        if name == "neighbours, put back as halves":
            a, b = wide[..., 0::2], wide[..., 1::2]
        first, second = a * c - b * s, b * c + a * s
        if name == "both minus":
            second = b * c - a * s
        if name == "second from the turned first":
            second = b * c + first * s
        if name == "in place":
            a.copy_(first)
            b.copy_(second)
            return x
        if name == "halves interleaved":
            return torch.stack([first, second], -1).flatten(-2).to(x.dtype)
        if name == "halves swapped":
            first, second = second, first
        turned = torch.cat([first, second], dim=-1)
        return turned if name == "float32 stays" else turned.to(x.dtype)

    return part


WRONG_ROTARY = [
    *("rounded between", "in place", "angles of the first token", "one angle for all pairs"),
    *("the axis at the wrong place", "backwards", "neighbours", "both minus"),
    *("neighbours, put back as halves", "second from the turned first", "halves interleaved"),
    *("halves swapped", "float32 stays"),
]


def partly_by_complex_numbers(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Right, as numbers of the complex plane."""
    half = cos.shape[-1]
    points = torch.complex(x[..., :half].float(), x[..., half : 2 * half].float())
    turned = points * torch.complex(cos, sin)[:, None]
    parts = [turned.real.to(x.dtype), turned.imag.to(x.dtype), x[..., 2 * half :]]
    return torch.cat(parts, dim=-1)


def partly_by_padding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Right, in a copy of the heads."""
    half, turned = cos.shape[-1], x.clone()
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    a, b = x[..., :half].float(), x[..., half : 2 * half].float()
    turned[..., :half] = (a * c - b * s).to(x.dtype)
    turned[..., half : 2 * half] = (b * c + a * s).to(x.dtype)
    return turned


def wrong_partly(name: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def part(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half, size = cos.shape[-1], x.shape[-1]
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        first, second = slice(0, half), slice(half, 2 * half)
        match name:
            case "pairs over the whole head":
                second = slice(size // 2, size // 2 + half)
            case "neighbours":
                first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
            case "the last numbers":
                first, second = slice(size - 2 * half, size - half), slice(size - half, size)
            case "backwards":
                s = -s
            case "angles of the first token":
                c, s = c[:1], s[:1]
        turned = x if name == "in place" else x.clone()
        turned = turned.float() if name == "float32 stays" else turned
        if name == "the rest is zero":
            turned[..., 2 * half :] = 0
        a, b = x[..., first].float(), x[..., second].float()
        turned[..., first] = (a * c - b * s).to(turned.dtype)
        if name == "second from the turned first":
            a = turned[..., first].float()
        turned[..., second] = (b * c + a * s).to(turned.dtype)
        if name == "the rest is dropped":
            return turned[..., : 2 * half]
        if name == "the rest comes first":
            return torch.cat([turned[..., 2 * half :], turned[..., : 2 * half]], dim=-1)
        return turned

    return part


WRONG_PARTLY = [
    *("pairs over the whole head", "neighbours", "the last numbers", "backwards", "in place"),
    *("angles of the first token", "the rest is zero", "second from the turned first"),
    *("the rest is dropped", "the rest comes first", "float32 stays"),
]


def order_by_loops(num_rows: int, heads: int) -> torch.Tensor:
    """Right, and written out."""
    size = num_rows // heads
    order = []
    for head in range(heads):
        order += [head * size + row for row in range(0, size, 2)]
        order += [head * size + row for row in range(1, size, 2)]
    return torch.tensor(order)


def order_by_inverting(num_rows: int, heads: int) -> torch.Tensor:
    """Right: the inverse of the converter's own permutation."""
    rows = torch.arange(num_rows).reshape(heads, 2, -1)
    return rows.swapaxes(1, 2).flatten().argsort()


def wrong_order(name: str) -> Callable[[int, int], object]:
    def part(num_rows: int, heads: int) -> object:
        rows, size = torch.arange(num_rows), num_rows // heads
        match name:
            case "nothing done":
                return rows
            case "the converter's own":
                return rows.reshape(heads, 2, -1).swapaxes(1, 2).flatten()
            case "over all heads":
                return torch.cat([rows[::2], rows[1::2]])
            case "odds first":
                return rows.reshape(heads, -1, 2).flip(-1).transpose(1, 2).flatten()
            case "heads as pairs":
                return rows.reshape(-1, heads, 2).transpose(1, 2).flatten()
            case "heads mixed":
                return rows.reshape(heads, -1, 2).permute(2, 0, 1).flatten()
            case "one head only":
                return torch.cat([torch.arange(0, size, 2), torch.arange(1, size, 2)])
            case "not flattened":
                return rows.reshape(heads, -1, 2).transpose(1, 2)
            case "a list":
                return rows.reshape(heads, -1, 2).transpose(1, 2).flatten().tolist()
            case "floats":
                return rows.float().reshape(heads, -1, 2).transpose(1, 2).flatten()
            case "without the head's start":
                one = torch.cat([torch.arange(0, size, 2), torch.arange(1, size, 2)])
                return one.repeat(heads)
        raise AssertionError(name)

    return part


WRONG_ORDERS = [
    *("nothing done", "the converter's own", "over all heads", "odds first", "heads as pairs"),
    *("heads mixed", "one head only", "not flattened", "a list", "floats"),
    "without the head's start",
]


def swiglu_by_sigmoid(gate: Tensor, up: Tensor) -> Tensor:
    """Right, written out."""
    return torch.sigmoid(gate) * gate * up


def swiglu_by_numbers(gate: Tensor, up: Tensor) -> Tensor:
    """Right, and slow."""

    def one(z: float, u: float) -> float:
        return (z / (1 + math.exp(-z)) if z > -50 else 0.0) * u

    pairs = zip(gate.flatten().tolist(), up.flatten().tolist(), strict=True)
    return torch.tensor([one(*pair) for pair in pairs]).reshape(gate.shape).to(gate.dtype)


WRONG_SWIGLU: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gate and up swapped": lambda gate, up: functional.silu(up) * gate,
    "sigmoid alone": lambda gate, up: gate.sigmoid() * up,
    "relu": lambda gate, up: functional.relu(gate) * up,
    "gelu": lambda gate, up: functional.gelu(gate) * up,
    "of the product": lambda gate, up: functional.silu(gate * up),
    "added": lambda gate, up: functional.silu(gate) + up,
    "up left out": lambda gate, up: functional.silu(gate),
    "exp over exp": lambda gate, up: gate * gate.exp() / (1 + gate.exp()) * up,
    "sign of the exponent": lambda gate, up: gate / (1 + gate.exp()) * up,
    "in place": lambda gate, up: functional.silu(gate, inplace=True) * up,
    "float32 stays": lambda gate, up: functional.silu(gate.float()) * up.float(),
    "a module": lambda gate, up: nn.SiLU(),  # type: ignore[return-value, arg-type]
    "softmax": lambda gate, up: gate.softmax(-1) * gate * up,
}


ANSWERS = {
    "depends_on_distance_only": Answers(
        right=(distance_by_loops, distance_by_shifts, wrong_distance("nothing")),
        wrong={name: wrong_distance(name) for name in WRONG_DISTANCES},
        equivalent={
            "0 -> 1": "another random query and key",
            "64 -> 65": "one position more is tested, for the query",
            "64 -> 65 #2": "one position more is tested, for the key",
        },
    ),
    "apply_rotary": Answers(
        right=(rotary_by_complex_numbers, rotary_by_rotated_halves, wrong_rotary("nothing")),
        wrong={name: wrong_rotary(name) for name in WRONG_ROTARY},
        equivalent={},
    ),
    "rotate_first": Answers(
        right=(partly_by_complex_numbers, partly_by_padding, wrong_partly("nothing")),
        wrong={name: wrong_partly(name) for name in WRONG_PARTLY},
        equivalent={},
    ),
    "unpermuted_rows": Answers(
        right=(order_by_loops, order_by_inverting),
        wrong={name: wrong_order(name) for name in WRONG_ORDERS},
        equivalent={},
    ),
    "rms_norm": Answers(
        right=(rms_norm_of_torch, rms_norm_by_norms, wrong_rms_norm("nothing")),
        wrong={name: wrong_rms_norm(name) for name in WRONG_RMS_NORM},
        equivalent={},
    ),
    "swiglu": Answers(
        right=(swiglu_by_sigmoid, swiglu_by_numbers),
        wrong=WRONG_SWIGLU,
        equivalent={},
    ),
}
