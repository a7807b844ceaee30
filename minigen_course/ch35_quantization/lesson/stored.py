"""What the benchmarks of this chapter stored, and every way to store the model side by side.

A part that has not been measured is None, and a figure of it says which benchmark measures it.
"""

import json
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from minigen.checkpoint.checkpoint import Checkpoint
from minigen.quantization.grid import Grid
from minigen_course.ch35_quantization.figures import Form
from minigen_course.figures.style import QUIET, figure
from minigen_course.handout.course_files import results_folder

METHODS, GROUP = ("RTN", "AWQ", "GPTQ"), 64
ORDER = "RTN > AWQ > GPTQ in KL divergence"
FILE = "the file, Q4_1"


def stored(name: str, *parts: str, folder: Path | None = None) -> Any:
    """Return a part of `benchmarks/results/NAME.json`; None if it has not been measured."""
    path = (folder or results_folder()) / f"{name}.json"
    found: Any = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for part in parts:
        found = found.get(part) if isinstance(found, Mapping) else None
        if found is None:
            return None
    return found or None


def drawn(draw: Callable[[], Figure], name: str, *needed: Any) -> Figure:
    """Return a figure of stored results, or one that says how to measure what is `needed`."""
    if all(each is not None for each in needed):
        return draw()
    made, axes = figure(8, 0.9)
    axes.axis("off")
    text = f"Not measured yet: python benchmarks/{name}.py --json benchmarks/results/{name}.json"
    axes.text(0, 0.5, text, color=QUIET, va="center", transform=axes.transAxes)
    return made


def rise(found: Mapping[str, Any], form: str, text: str) -> float:
    """Return by how many per cent a form's perplexity on a text exceeds that of the file itself."""
    own: float = found["none"][text]["perplexity"]
    return 100 * (found[form][text]["perplexity"] / own - 1)


def rises(found: Mapping[str, Any], text: str) -> dict[str, float]:
    """Return `rise` of every form of a model that was measured on a text."""
    measured = (form for form, each in found.items() if "perplexity" in each.get(text, ()))
    return {form: rise(found, form, text) for form in measured}


def order_at(methods: Mapping[str, Any], bits: int, text: str) -> str | None:
    """Return the methods from the largest divergence to the smallest; None if not measured.

    Between neighbours stands ">" if the paired interval excludes 0, else "~".
    """
    if f"order at {bits} bits" not in methods:
        return None
    pairs = methods[f"order at {bits} bits"][text]
    worst_first = sorted(
        METHODS, key=lambda each: -methods[f"{each}, {bits} bits"][text]["kl divergence"]
    )
    said = worst_first[0]
    for one, other in pairwise(worst_first):
        pair = pairs.get(f"{one} - {other}") or pairs[f"{other} - {one}"]
        said += f" {'~' if pair['kl divergence']['verdict'] == 'undecided' else '>'} {other}"
    return said


def model_bytes(checkpoint: Checkpoint, of_matrix: Callable[[int, int], int]) -> int:
    """Return the bytes of the model if each matrix of its layers takes `of_matrix(rows, columns)`.

    The embedding and the norms stay as the file has them.
    """
    total = 0
    for name, each in checkpoint.tensors.items():
        is_matrix = name.endswith("proj.weight")
        total += of_matrix(*each.shape) if is_matrix else each.num_bytes
    return total


def forms(
    checkpoint: Checkpoint,
    text: str,
    speeds: Mapping[str, float],
    folder: Path | None = None,
    group_size: int = GROUP,
) -> list[Form]:
    """Return what was stored of each form of the default model, with speeds by the forms' names.

    The error is that of one matrix, and only of plain rounding: the methods aim at the outputs.
    """
    name = "35_quantization"
    methods = stored(name, "methods", folder=folder) or {}
    codes = stored(name, "codes", folder=folder) or {}
    mixed = stored(name, "mixed", folder=folder) or {}
    errors = stored(name, "matrices", "SmolLM2 down", folder=folder) or {}

    def form(label: str, found: Any, num_bytes: int, error: float | None = None) -> Form:
        quality = None if found is None else found[text]
        low, high = (None, None) if quality is None else quality["perplexity interval"]
        value = None if quality is None else quality["perplexity"]
        return Form(label, error, value, low, high, num_bytes, speeds.get(label))

    own = model_bytes(checkpoint, lambda rows, columns: rows * columns * 5 // 8)
    rows = [form(FILE, methods.get("none"), own, 0.0)]
    eight = model_bytes(checkpoint, Grid(8, -1, symmetric=True).num_bytes)
    rows.append(form("int8 (W8A8)", codes.get("W8A8"), eight, errors.get("int8 per row")))
    smoothed = [label for label in codes if label.startswith("W8A8, ")]
    rows += [form(label, codes[label], eight) for label in smoothed]
    eight = model_bytes(checkpoint, lambda rows, columns: rows * columns + 4 * rows)
    rows.append(form("FP8", codes.get("FP8"), eight, errors.get("FP8 per row")))
    four = model_bytes(checkpoint, lambda rows, columns: rows * columns * 9 // 16)
    rows.append(form("NF4", codes.get("NF4"), four, errors.get("NF4")))
    for bits in (4, 3, 2):
        size = model_bytes(checkpoint, Grid(bits, group_size, symmetric=False).num_bytes)
        for method in METHODS:
            error = errors.get(f"{bits} bits, groups of {GROUP}") if method == "RTN" else None
            label = f"{method}, {bits} bits"
            rows.append(form(label, methods.get(label), size, error))
    if mixed:
        uniform = model_bytes(checkpoint, Grid(3, group_size, symmetric=False).num_bytes)
        size = uniform + mixed["bytes"]["mixed"] - mixed["bytes"]["uniform"]
        rows.append(form("mixed, 3 bits", mixed["mixed"], size))
    return rows


def scaled_speeds(live: Mapping[str, float], ratios: Mapping[str, Any] | None) -> dict[str, float]:
    """Return tokens per second by the forms' names: live ones, and stored ratios times live ones.

    `live` has those of `int4` and `int8`; `ratios` is the "speed" of `35_decode_speed`.
    """
    found = {FILE: live["int4"]}
    for label, name in (("4 bits, groups of 64", "4 bits"), ("8 bits, whole rows", "int8 (W8A8)")):
        if ratios is None or label not in ratios:
            continue
        speed = live[ratios[label]["baseline"]] * ratios[label]["speed"]
        labels = [f"{each}, 4 bits" for each in METHODS] if name == "4 bits" else [name]
        found |= dict.fromkeys(labels, speed)
    return found
