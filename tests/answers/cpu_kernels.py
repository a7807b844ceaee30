"""Answers to the exercises of chapter 34."""

from collections.abc import Callable
from typing import Any

import numpy as np

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
    """Right, in plain numbers."""
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


ANSWERS = {
    "by_panels": Answers(
        right=(panels_by_loops, panels_one_by_one, wrong_panels("none of them")),
        wrong={name: wrong_panels(name) for name in WRONG_PANELS},
        equivalent={"1 -> 2": "NumPy finds the size that is negative, be it -1 or -2"},
    ),
    "quantise_groups": Answers(
        right=(quantise_by_loops, quantise_with_ones, wrong_quantise("none of them")),
        wrong={name: wrong_quantise(name) for name in WRONG_QUANTISE},
        equivalent={"1 -> 2": "NumPy finds the size that is negative, be it -1 or -2"},
    ),
}
