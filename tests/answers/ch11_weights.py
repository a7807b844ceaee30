"""Answers to the exercises of chapter 11."""

from collections.abc import Callable

import numpy as np
import torch

from tests.answers import Answers


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


def q4_1_by_numpy(blocks: torch.Tensor) -> torch.Tensor:
    """Right, in numpy."""
    raw = blocks.numpy()
    header = np.ascontiguousarray(raw[..., :4]).view(np.float16).astype(np.float32)
    low, high = raw[..., 4:] % 16, raw[..., 4:] // 16
    steps = np.concatenate([low, high], axis=-1).astype(np.float32)
    return torch.from_numpy(steps * header[..., :1] + header[..., 1:])


def wrong_q4_1(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def part(blocks: torch.Tensor) -> torch.Tensor:
        rows, count, _ = blocks.shape
        kind = torch.bfloat16 if name == "bfloat16" else torch.float16
        header = blocks[..., :4].contiguous().view(kind).float()
        scale, minimum = header[..., :1], header[..., 1:]
        if name == "minimum first":
            scale, minimum = minimum, scale
        if name == "first block's scale":
            scale, minimum = scale[:, :1], minimum[:, :1]
        if name == "first row's scale":
            scale, minimum = scale[:1], minimum[:1]
        packed = blocks[..., 4:]
        low, high = packed & 15, packed >> 4
        steps = torch.cat([high, low] if name == "high first" else [low, high], dim=-1).float()
        if name == "interleaved":
            steps = torch.stack([low, high], dim=-1).flatten(-2).float()
        if name == "high not shifted":
            steps = torch.cat([low, packed & 240], dim=-1).float()
        if name == "low not masked":
            steps = torch.cat([packed, high], dim=-1).float()
        if name == "centred":
            steps = steps - 8
        if name == "signed":
            steps = torch.where(steps > 7, steps - 16, steps)
        if name == "no minimum":
            return steps * scale
        if name == "minimum taken off":
            return steps * scale - minimum
        if name == "minimum scaled":
            return (steps + minimum) * scale
        if name == "half":
            return (steps * scale + minimum).half()
        if name == "flat":
            return (steps * scale + minimum).reshape(rows, count * 32)
        return steps * scale + minimum

    return part


WRONG_Q4_1 = [
    *("bfloat16", "minimum first", "first block's scale", "first row's scale", "high first"),
    *("interleaved", "high not shifted", "low not masked", "centred", "signed", "no minimum"),
    *("minimum taken off", "minimum scaled", "half", "flat"),
]


ANSWERS = {
    "unpermuted_rows": Answers(
        right=(order_by_loops, order_by_inverting),
        wrong={name: wrong_order(name) for name in WRONG_ORDERS},
        equivalent={},
    ),
    "unpack_q4_1": Answers(
        right=(q4_1_by_numpy, wrong_q4_1("nothing")),
        wrong={name: wrong_q4_1(name) for name in WRONG_Q4_1},
        equivalent={},
    ),
}
