"""Answers to the exercises of chapter 34."""

from collections.abc import Callable
from typing import Any

import numpy as np

from minigen_course.ch34_cpu_kernels.reference import ByteRows, CodeRows
from tests.answers import Answers


def panels_by_loops(rows: np.ndarray) -> np.ndarray:
    """Right, word by word."""
    num_rows, groups, words = rows.shape
    made, place = np.empty(rows.size, rows.dtype), 0
    for panel in range(0, num_rows, 16):
        for group in range(groups):
            for word in range(words):
                for lane in range(16):
                    made[place] = rows[panel + lane, group, word]
                    place += 1
    return made


def panels_one_by_one(rows: np.ndarray) -> np.ndarray:
    """Right, each panel transposed as a matrix."""
    parts = np.split(rows, len(rows) // 16)
    return np.concatenate([part.reshape(16, -1).T.flatten() for part in parts])


def wrong_panels(name: str) -> Callable[[np.ndarray], Any]:
    def part(rows: np.ndarray) -> Any:
        groups, words = rows.shape[1:]
        lanes = 8 if name == "eight lanes" else 16
        panels = rows.reshape(-1, lanes, groups, words)
        if name == "every third row":
            panels = rows.reshape(16, -1, groups, words).transpose(1, 0, 2, 3)
        order = {
            "as it was": (0, 1, 2, 3),
            "words before groups": (0, 3, 2, 1),
            "lanes before words": (0, 2, 1, 3),
            "groups before panels": (2, 0, 3, 1),
            "lanes before panels": (2, 3, 1, 0),
        }.get(name, (0, 2, 3, 1))
        made = np.ascontiguousarray(panels.transpose(order))
        if name == "lanes backwards":
            made = made[..., ::-1]
        if name == "not flat":
            return made
        if name == "only a view":
            return np.repeat(made.reshape(-1), 2)[::2]
        if name == "first panel":
            return made[:1].reshape(-1)
        if name == "another type":
            return made.reshape(-1).astype(np.int64)
        if name == "a list":
            return made.reshape(-1).tolist()
        if name == "in the rows' memory":
            rows[:] = made.reshape(rows.shape)
            return rows.reshape(-1)
        if name == "nothing":
            return None
        return made.reshape(-1)

    return part


WRONG_PANELS = [
    *("eight lanes", "every third row", "as it was", "words before groups", "lanes before words"),
    *("groups before panels", "lanes before panels", "lanes backwards", "not flat"),
    *("only a view", "first panel", "another type", "a list", "in the rows' memory", "nothing"),
]


def quantise_by_loops(rows: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Right, with plain Python numbers."""
    num_groups = rows.shape[1] // size
    codes = np.zeros((len(rows), num_groups, size), np.int8)
    scales = np.zeros((len(rows), num_groups), np.float32)
    for row in range(len(rows)):
        for group in range(num_groups):
            numbers = [float(each) for each in rows[row, group * size : (group + 1) * size]]
            scale = max(abs(each) for each in numbers) / 127
            scales[row, group] = scale
            if scale > 0:
                codes[row, group] = [round(each / scale) for each in numbers]
    return codes, scales


def quantise_with_ones(rows: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Right, dividing zeros by 1."""
    groups = rows.reshape(rows.shape[0], rows.shape[1] // size, size)
    scales = np.maximum(groups.max(-1), -groups.min(-1)) / np.float32(127)
    steps = np.where(scales == 0, np.float32(1), scales)
    return np.floor(groups / steps[..., None] + 0.5).astype(np.int8), scales


def wrong_quantise(name: str) -> Callable[[np.ndarray, int], Any]:
    def part(rows: np.ndarray, size: int) -> Any:
        if name == "changes the rows":
            rows *= 2
        groups = rows.reshape(len(rows), -1, size)
        sizes = groups if name == "the largest, not the farthest" else np.abs(groups)
        largest = sizes.max(axis=-1)
        if name == "one scale for all":
            largest = np.full_like(largest, largest.max())
        if name == "a scale for each row":
            largest = np.repeat(largest.max(-1, keepdims=True), largest.shape[1], axis=1)
        if name == "rows share scales":
            largest = np.repeat(largest.max(0, keepdims=True), len(rows), axis=0)
        scales = largest / np.float32(128 if name == "128 steps" else 127)
        if name == "the mean":
            scales = sizes.mean(-1) / np.float32(127)
        if name == "steps of 4 bits":
            scales = largest / np.float32(7)
        safe = np.where(scales > 0, scales, np.float32(1))
        if name == "divides by zero":
            safe = scales
        exact = groups / safe[..., None]
        if name == "cuts off":
            codes = exact
        elif name == "rounds up":
            codes = np.ceil(exact)
        elif name == "rounds away":
            codes = np.sign(exact) * np.ceil(np.abs(exact))
        else:
            codes = np.rint(exact)
        if name == "forgets the sign":
            codes = np.abs(codes)
        codes = codes.astype(np.int8)
        if name == "unsigned":
            return codes.view(np.uint8), scales
        if name == "float codes":
            return codes.astype(np.float32), scales
        if name == "scales of 64 bits":
            return codes, scales.astype(np.float64)
        if name == "scales upside down":
            return codes, 1 / safe
        if name == "zeros have scale 1":
            return codes, safe
        if name == "flat":
            return codes.reshape(rows.shape), scales
        if name == "numbers again":
            return codes * scales[..., None]
        return codes, scales

    return part


WRONG_QUANTISE = [
    *("changes the rows", "the largest, not the farthest", "one scale for all"),
    *("a scale for each row", "rows share scales", "128 steps", "the mean", "steps of 4 bits"),
    *("divides by zero", "cuts off", "rounds up", "rounds away", "forgets the sign", "unsigned"),
    *("float codes", "scales of 64 bits", "scales upside down", "zeros have scale 1", "flat"),
    "numbers again",
]


def bytes_by_loops(
    codes: np.ndarray, scales: np.ndarray, inputs: np.ndarray, input_scales: np.ndarray
) -> np.ndarray:
    """Right, with plain Python numbers."""
    made = np.zeros(len(codes), np.float32)
    for row in range(len(codes)):
        total = 0.0
        for group in range(len(inputs)):
            pairs = zip(codes[row, group].tolist(), inputs[group].tolist(), strict=True)
            dot = sum(one * other for one, other in pairs)
            total += dot * float(scales[row, group]) * float(input_scales[group])
        made[row] = total
    return made


def bytes_by_groups(
    codes: np.ndarray, scales: np.ndarray, inputs: np.ndarray, input_scales: np.ndarray
) -> np.ndarray:
    """Right, one integer matrix product per group."""
    made = np.zeros(len(codes), np.float32)
    for group in range(len(inputs)):
        dots = codes[:, group].astype(np.int64) @ inputs[group].astype(np.int64)
        made += (np.asarray(dots) * scales[:, group] * input_scales[group]).astype(np.float32)
    return made


def wrong_bytes(name: str) -> Callable[..., Any]:
    def part(codes: Any, scales: Any, inputs: Any, input_scales: Any) -> Any:
        wide: Any = {
            "products of 8 bits": np.int8,
            "sums of 16 bits": np.int16,
            "floats from the start": np.float32,
        }.get(name, np.int32)
        if name == "bytes have no sign":
            codes = codes.view(np.uint8)
        if name == "changes the scales":
            scales *= input_scales
        if name == "scaled weights":
            wide, codes = np.float32, codes * scales[..., None]
            scales = np.ones_like(scales)
        products = codes.astype(wide) * inputs.astype(wide)
        dots = products.sum(axis=-1, dtype=wide)
        if name == "one scale for each row":
            scales = scales[:, :1]
        if name == "one input scale":
            input_scales = input_scales[:1]
        if name == "no scales of weights":
            scales = 1
        if name == "no scales of inputs":
            input_scales = 1
        if name == "scales after the sum":
            return (dots.sum(-1) * scales.mean(-1) * input_scales.mean()).astype(np.float32)
        if name == "scales added":
            found = dots * (scales + input_scales)
        else:
            found = dots * scales * input_scales
        if name == "by groups still":
            return found.astype(np.float32)
        if name == "divides by the scales":
            found = dots / (scales * input_scales)
        made = found.sum(axis=-1)
        if name == "in 64 bits":
            return made.astype(np.float64)
        if name == "a list":
            return made.tolist()
        if name == "nothing":
            return None
        return made.astype(np.float32)

    return part


WRONG_BYTES = [
    *("products of 8 bits", "sums of 16 bits", "floats from the start", "bytes have no sign"),
    *("changes the scales", "scaled weights", "one scale for each row", "one input scale"),
    *("no scales of weights", "no scales of inputs", "scales after the sum", "scales added"),
    *("by groups still", "divides by the scales", "in 64 bits", "a list", "nothing"),
]


def multiply_by_loops(weights: CodeRows, inputs: ByteRows) -> np.ndarray:
    """Right, with plain Python numbers."""
    tokens, rows = len(inputs.numbers), len(weights.codes)
    made = np.zeros((tokens, rows), np.float32)
    for token, row in np.ndindex(tokens, rows):
        total = 0.0
        for group in range(weights.codes.shape[1]):
            codes = [int(each) for each in weights.codes[row, group]]
            zero = int(inputs.zeros[token, group])
            steps = [int(each) + zero for each in inputs.numbers[token, group]]
            dot = sum(code * step for code, step in zip(codes, steps, strict=True))
            product = dot * float(weights.scales[row, group])
            product += sum(steps) * float(weights.minima[row, group])
            total += product * float(inputs.scales[token, group])
        made[token, row] = total
    return made


def multiply_by_groups(weights: CodeRows, inputs: ByteRows) -> np.ndarray:
    """Right, one matrix product per group, in float32."""
    made = np.zeros((len(inputs.numbers), len(weights.codes)), np.float32)
    for group in range(weights.codes.shape[1]):
        codes = weights.codes[:, group].astype(np.int32)
        steps = inputs.numbers[:, group].astype(np.int32) + inputs.zeros[:, group, None]
        dots = (steps @ codes.T).astype(np.float32)
        part = dots * weights.scales[:, group]
        part += np.outer(steps.sum(-1), weights.minima[:, group]).astype(np.float32)
        made += part * inputs.scales[:, group, None]
    return made


def wrong_multiply(name: str) -> Callable[[CodeRows, ByteRows], Any]:
    def part(weights: CodeRows, inputs: ByteRows) -> Any:
        wide: Any = np.int32
        if name == "sums of 8 bits":
            wide = np.uint8
        elif name == "sums of 16 bits":
            wide = np.int16
        elif name == "floats from the start":
            wide = np.float32
        codes, numbers = weights.codes.astype(wide), inputs.numbers.astype(wide)
        if name == "bytes have no sign":
            numbers = inputs.numbers.view(np.uint8).astype(wide)
        scales, minima, zeros = weights.scales, weights.minima, inputs.zeros
        if name == "changes the zeros":
            zeros += 1
        if name == "one zero for all groups":
            zeros = np.repeat(zeros[:, :1], zeros.shape[1], axis=1)
        if name == "one scale for all groups":
            scales = np.repeat(scales[:, :1], scales.shape[1], axis=1)
        if name == "scaled codes":
            codes = codes * scales[..., None] + minima[..., None]
        dots = np.einsum("tgc,rgc->trg", numbers, codes)
        if name == "dots of 8 bits":
            dots = dots.astype(np.int8)
        code_sums, byte_sums = codes.sum(axis=-1), numbers.sum(axis=-1)
        if name == "the zero is taken away":
            zeros = -zeros
        if name == "the zero meets the bytes":
            dots = dots + (zeros * byte_sums)[:, None]
        elif name == "the zero, once a group":
            dots = dots + zeros[:, None]
        elif name != "no zero for the codes":
            dots = dots + zeros[:, None] * code_sums
        if name == "the zero, once for the minimum":
            byte_sums = byte_sums + zeros
        elif name != "no zero for the minimum":
            byte_sums = byte_sums + 32 * zeros
        found = dots * (1 if name == "no scales of weights" else scales)
        if name == "scaled codes":
            found = dots + 0 * scales
        elif name == "the minimum meets the codes":
            found = found + (minima * code_sums)[None]
        elif name == "the minimum is scaled, too":
            found = found + byte_sums[:, None] * minima * scales
        elif name != "no minimum":
            found = found + byte_sums[:, None] * minima
        if name != "no scales of inputs":
            found = found * inputs.scales[:, None]
        made = found.sum(axis=-1)
        if name == "in 64 bits":
            return made
        if name == "rows before tokens":
            return made.T.astype(np.float32)
        if name == "by groups still":
            return found.astype(np.float32)
        if name == "a list":
            return made.tolist()
        if name == "nothing":
            return None
        return made.astype(np.float32)

    return part


WRONG_MULTIPLY = [
    *("sums of 8 bits", "sums of 16 bits", "floats from the start", "bytes have no sign"),
    *("changes the zeros", "one zero for all groups", "one scale for all groups", "scaled codes"),
    *("dots of 8 bits", "the zero is taken away", "the zero meets the bytes"),
    *("the zero, once a group", "no zero for the codes", "the zero, once for the minimum"),
    *("no zero for the minimum", "no scales of weights", "the minimum meets the codes"),
    *("the minimum is scaled, too", "no minimum", "no scales of inputs", "in 64 bits"),
    *("rows before tokens", "by groups still", "a list", "nothing"),
]


ANSWERS = {
    "quantise_groups": Answers(
        right=(quantise_by_loops, quantise_with_ones, wrong_quantise("none of them")),
        wrong={name: wrong_quantise(name) for name in WRONG_QUANTISE},
        equivalent={"1 -> 2": "NumPy infers a negative size, be it -1 or -2"},
    ),
    "multiply_bytes": Answers(
        right=(bytes_by_loops, bytes_by_groups, wrong_bytes("none of them")),
        wrong={name: wrong_bytes(name) for name in WRONG_BYTES},
        equivalent={},
    ),
    "by_panels": Answers(
        right=(panels_by_loops, panels_one_by_one, wrong_panels("none of them")),
        wrong={name: wrong_panels(name) for name in WRONG_PANELS},
        equivalent={"1 -> 2": "NumPy infers a negative size, be it -1 or -2"},
    ),
    "multiply_codes": Answers(
        right=(multiply_by_loops, multiply_by_groups, wrong_multiply("none of them")),
        wrong={name: wrong_multiply(name) for name in WRONG_MULTIPLY},
        equivalent={},
    ),
}
