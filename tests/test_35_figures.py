"""The figures of quantization: grids, formats bit by bit, methods, quality, and the KV cache."""

import base64
import struct
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import quants
from ipywidgets.widgets.widget import _instances
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minigen.checkpoint.quantized.floats import NF4
from minigen.checkpoint.quantized.integers import AwqMatrix
from minigen.checkpoint.quantized.matrix import Groups
from minigen.quantization.gptq import gptq
from minigen.quantization.grid import Grid
from minigen_course.ch35_quantization import figures as draw
from minigen_course.ch35_quantization.figures import methods, weights
from minigen_course.figures import explore as explorables
from minigen_course.figures.explore import png
from minigen_course.figures.style import BLUE, ORANGE

ONES = torch.ones(1, 8)
IN_GGUF = ("Q8_0", "Q4_1", "Q4_K", "MXFP4", "NVFP4")


def title_of(axes: Axes) -> str:
    return axes.get_title(loc="left")


def texts(axes: Axes) -> list[str]:
    return [each.get_text() for each in axes.texts]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_block(name: str, seed: int = 0) -> bytes:
    """Return a block with random codes, and scales that are plain numbers."""
    made = bytearray(np.random.default_rng(seed).integers(0, 256, 144, np.uint8).tobytes())
    heads = {
        "Q8_0": struct.pack("<e", 0.01),
        "Q4_1": struct.pack("<ee", 0.01, -0.08),
        "Q4_K": struct.pack("<ee", 0.001, 0.002),
        "MXFP4": bytes([120]),
        "NVFP4": bytes([0x38, 0x31, 0x07, 0x41]),
        "NF4": struct.pack("<f", 0.12),
        "FP8 e4m3": struct.pack("<f", 0.5),
        "FP8 e5m2": struct.pack("<f", 0.5),
    }
    made[: len(heads[name])] = heads[name]
    length = {"Q8_0": 34, "Q4_1": 20, "Q4_K": 144, "MXFP4": 17, "NVFP4": 36, "NF4": 36}
    return bytes(made[: length.get(name, 20)])


def test_scales_of_smaller_units_spare_the_other_weights() -> None:
    weight = normal(8, 128)
    errors: dict[str, list[float]] = {unit: [] for unit in weights.UNITS}
    for outlier in (4.0, 12.0, 40.0):
        made = draw.outlier_histogram(weight, outlier, "row", group_size=32)
        shown = [each.get_width() for each in made.axes[3].patches if isinstance(each, Rectangle)]
        assert shown == sorted(shown, reverse=True)
        for unit, each in zip(weights.UNITS, shown, strict=True):
            errors[unit].append(each)
    for found in errors.values():
        assert found == sorted(found)
    assert errors["tensor"][-1] > 95  # all other weights became 0
    assert errors["group"][-1] < 30


@pytest.mark.parametrize("per", weights.UNITS)
@pytest.mark.parametrize("bits", [2, 8])
def test_the_chosen_unit_is_lit_and_its_grid_is_drawn(per: str, bits: int) -> None:
    made = draw.outlier_histogram(normal(4, 64), -20, per, bits)
    lit = [to_hex(each.get_facecolor()) == ORANGE for each in made.axes[3].patches]
    assert lit == [unit == per for unit in weights.UNITS]
    grid = [line for line in made.axes[0].lines if line.get_color() == ORANGE]
    assert len(grid) == 2**bits - 1
    assert [text.split(":")[0] for text in texts(made.axes[2])] == (
        ["every weight's grid"]
        if per == "tensor"
        else [f"grid of the outlier's {per}", f"grid of another {per}"]
    )
    if (per, bits) == ("row", 8):
        png(made)


def test_an_unknown_unit_and_odd_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="not per column"):
        draw.outlier_histogram(normal(4, 64), 9, "column")
    with pytest.raises(ValueError, match="no whole groups of 64"):
        draw.outlier_histogram(normal(4, 65), 9, "row")


def test_natural_outliers_are_counted() -> None:
    weight = normal(64, 64).clamp(-3, 3)
    weight[0, :2] = torch.tensor([60.0, -40.0])
    made = draw.natural_outliers(weight, sigmas=6)
    legend = made.axes[0].get_legend()
    assert legend is not None
    assert legend.get_texts()[1].get_text() == "2 of 4,096 weights beyond 6 σ"
    step = 60 / 127
    inside = 2 * int(6 * float(weight.std()) / step) + 1
    assert title_of(made.axes[0]).startswith(f"{inside} of the grid's 255 values")
    png(made)


@pytest.mark.parametrize("name", IN_GGUF)
def test_bits_per_weight_are_those_of_gguf(name: str) -> None:
    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    made_of = draw.FORMATS[name]
    assert made_of.num_weights == size
    assert made_of.bits_per_weight == 8 * num_bytes / size


@pytest.mark.parametrize("name", IN_GGUF)
def test_a_weight_read_bit_by_bit_is_that_of_gguf(name: str) -> None:
    block = random_block(name)
    kind = gguf.GGMLQuantizationType[name]
    wanted = quants.dequantize(np.frombuffer(block, np.uint8), kind)
    found = [draw.FORMATS[name].read(block, each)[0] for each in range(len(wanted))]
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)


def test_nf4_is_read_high_half_first() -> None:
    block = struct.pack("<f", 0.5) + bytes([0x0F, 0x70] + [0x77] * 30)
    read = draw.FORMATS["NF4"].read
    assert [read(block, each)[0] for each in range(4)] == [
        0.5 * float(NF4[code]) for code in (0, 15, 7, 0)
    ]


@pytest.mark.parametrize(
    ("name", "dtype"), [("FP8 e4m3", torch.float8_e4m3fn), ("FP8 e5m2", torch.float8_e5m2)]
)
def test_all_finite_fp8_codes_are_those_of_torch(name: str, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    wanted = codes.view(dtype).float()
    block = struct.pack("<f", 1.0) + bytes(codes.tolist())
    for code in codes[torch.isfinite(wanted)].tolist():
        assert draw.FORMATS[name].read(block, code)[0] == float(wanted[code])


@pytest.mark.parametrize("name", draw.FORMATS)
def test_every_bit_of_a_block_belongs_to_one_field(name: str) -> None:
    made_of, block = draw.FORMATS[name], random_block(name)
    stored = made_of.num_stored(block)
    found = [
        bit
        for field in made_of.fields
        for index in range(-(-stored // field.per))
        for bit in field.places(index)
    ]
    assert sorted(found) == list(range(8 * len(block)))


@pytest.mark.parametrize("name", draw.FORMATS)
def test_a_block_frames_the_bits_of_a_weight(name: str) -> None:
    block = random_block(name, seed=1)
    last = draw.FORMATS[name].num_stored(block) - 1
    made = draw.block_bits(name, block, last)
    value, equation = draw.FORMATS[name].read(block, last)
    assert title_of(made.axes[0]).endswith(f"w[{last}] = {equation} = {value:.6f}")
    framed = sum(
        round(each.get_width()) for each in made.axes[0].patches if isinstance(each, Rectangle)
    )
    assert framed == sum(map(len, draw.FORMATS[name].places(last).values()))
    if name in ("Q4_K", "MXFP4"):  # without and with digits
        png(made)
    with pytest.raises(ValueError, match=f"no {last + 1}"):
        draw.block_bits(name, block, last + 1)


def test_strips_are_as_long_as_their_bits_per_weight() -> None:
    made = draw.format_strips()
    ends = dict.fromkeys(range(len(draw.FORMATS)), 0.0)
    for piece in made.axes[0].patches:
        assert isinstance(piece, Rectangle)
        line = round(piece.get_y() + piece.get_height() / 2)
        ends[line] = max(ends[line], piece.get_x() + piece.get_width())
    for line, each in enumerate(draw.FORMATS.values()):
        assert ends[line] == pytest.approx(each.bits_per_weight)
    assert len(made.axes[1].patches) == 8 + 4 + 4 + 4 + 8 + 8 + 4 + 4
    png(made)


def test_codes_lie_on_the_number_line() -> None:
    made = draw.number_line(normal(4, 64), group_size=32)
    labels = [each.get_text() for each in made.axes[1].get_yticklabels()]
    assert labels[1:3] == ["NF4\n16 values", "FP4 e2m1\n15 values"]  # 0 and -0 are one value
    assert weights.VALUES["FP8 e4m3"].max() == 448
    assert len(weights.VALUES["FP8 e4m3"]) == 254
    png(made)
    png(draw.number_line(names=["int8", "NF4"]))


ERRORS: dict[str, dict[str, float]] = {
    "SmolLM2 down": {"int8": 0.009, "own grid": 6e-8, "2 bits": 0.47, "weights beyond": 275},
    "MiniLM down": {"int8": 0.021, "own grid": 0.08, "2 bits": 0.47, "weights beyond": 74},
}


def test_the_file_s_own_grid_is_drawn_as_zero() -> None:
    made = draw.matrix_errors(ERRORS)
    axes = made.axes[0]
    forms = [each.get_text() for each in axes.get_yticklabels()]
    assert forms == ["int8", "own grid", "2 bits"]  # a count is no error
    places = [float(np.asarray(line.get_xdata())[0]) for line in axes.lines]
    zero = min(places)
    assert zero < 0.9
    assert places.count(zero) == 1
    made.canvas.draw()
    assert axes.get_xticklabels()[0].get_text() == "0"
    png(made)


def summary(perplexity: float, divergence: float) -> dict[str, Any]:
    return {
        "perplexity": perplexity,
        "perplexity interval": [0.9 * perplexity, 1.1 * perplexity],
        "kl divergence": divergence,
        "kl interval": [0.9 * divergence, 1.1 * divergence],
    }


def quality(*held: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"none": {"Alice": summary(20, 0)}}
    for bits, holds in zip((4, 3, 2), held, strict=False):
        for place, method in enumerate(("RTN", "AWQ", "GPTQ")):
            found[f"{method}, {bits} bits"] = {"Alice": summary(60 / bits - place, 1 / bits)}
        found[f"order at {bits} bits"] = {"Alice": {"RTN > AWQ > GPTQ in KL divergence": holds}}
    return found


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ((True, True, True), "RTN > AWQ > GPTQ at 4 and 3 and 2 bits"),
        ((False, True), "RTN > AWQ > GPTQ at 3 bits, not at 4"),
        ((False,), "RTN > AWQ > GPTQ: not at 4"),
    ],
)
def test_the_title_has_the_computed_order(held: tuple[bool, ...], said: str) -> None:
    made = draw.quality_by_bits(quality(*held), "Alice")
    assert title_of(made.axes[0]) == said
    ticks = [each.get_text() for each in made.axes[0].get_xticklabels()]
    assert ticks == ["4", "3", "2"][: len(held)]
    if all(held):
        png(made)


def test_forms_that_overlap_with_the_best_are_blue() -> None:
    found = {
        name: {"Alice": summary(20, divergence)}
        for name, divergence in (("RTN", 1.0), ("AWQ", 0.5), ("GPTQ", 0.55))
    }
    made = draw.quality_by_form(found | {"order": {}}, "Alice")
    labels = [each.get_text() for each in made.axes[0].get_yticklabels()]
    assert labels == ["RTN", "AWQ", "GPTQ"]
    dots = [line.get_color() for line in made.axes[0].lines if line.get_marker() == "o"]
    assert dots == [ORANGE, BLUE, BLUE]
    png(made)


FORMS = [
    draw.Form("file", 0.0, 20.0, 19.0, 21.0, 90_000_000, 95.0),
    draw.Form("int8", 0.01, 20.5, 19.5, 21.5, 160_000_000, 60.0),
    draw.Form("RTN", 0.1, 24.0, 23.0, 25.0, 80_000_000, None),
    draw.Form("AWQ", 0.1, 23.9, 23.0, 25.0, 80_000_000, None),
    draw.Form("2 bits", 0.5, 900.0, None, None, 50_000_000, None),
    draw.Form("no text", 0.5, None, None, None, 40_000_000, None),
]


def test_what_was_not_measured_is_said() -> None:
    made = draw.trade_offs(FORMS)
    missing = [texts(axes).count(" not measured") for axes in made.axes]
    assert missing == [0, 1, 0, 4]
    assert made.axes[1].get_xscale() == "log"  # 900 beside 20
    assert draw.trade_offs(FORMS[:4]).axes[1].get_xscale() == "linear"
    png(made)


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (85, "In 85 MB: AWQ, perplexity 23.9"),
        (90, "In 90 MB: file, perplexity 20.0"),
        (45, "Nothing fits into 45 MB"),
        (None, "Size and quality"),
    ],
)
def test_the_best_form_within_a_size_is_marked(limit: float | None, said: str) -> None:
    made = draw.size_and_quality(FORMS, limit)
    assert title_of(made.axes[0]) == said
    frontier = made.axes[0].lines[0]
    assert list(np.asarray(frontier.get_xdata())) == [50, 80, 90]
    names = [each for each in made.axes[0].texts if each.get_text()]  # others are lines
    heights = sorted(each.xyann[1] for each in names)  # type: ignore[attr-defined]
    assert len(heights) == 5
    assert heights == sorted(set(heights))


def test_the_search_marks_the_smallest_error() -> None:
    made = draw.search_curve([0.0, 0.5, 1.0], {"down": [2.0, 1.0, 3.0]})
    legend = made.axes[0].get_legend()
    assert legend is not None
    assert legend.get_texts()[0].get_text() == "down: α = 0.50, 0.50 of RTN's error"
    png(made)


def test_the_columns_with_the_largest_inputs_are_marked_in_all_panels() -> None:
    inputs = torch.ones(40)
    inputs[[3, 30]] = torch.tensor([9.0, 7.0])
    made = draw.columns_that_matter(inputs, torch.ones(40), 2, inputs.sqrt())
    assert title_of(made.axes[0]).endswith("2 columns at 8.0 times the median, on average")
    assert title_of(made.axes[1]).endswith("2 columns at 1.0 times the median, on average")
    for axes in made.axes:
        (dots,) = (line for line in axes.lines if line.get_marker() == "o")
        assert sorted(np.asarray(dots.get_xdata()).tolist()) == [3, 30]
    png(made)
    assert len(draw.columns_that_matter(inputs, torch.ones(40)).axes) == 2


def test_the_last_step_is_gptq_and_columns_on_the_left_stay() -> None:
    weight, inputs = normal(5, 16), normal(64, 16, seed=1) @ normal(16, 16, seed=2)
    hessian, grid = inputs.T @ inputs, Grid(3, 8, False)
    steps = draw.column_steps(weight, hessian, grid)
    assert len(steps) == 17
    wanted = gptq(weight, hessian, grid, static_groups=True).dequantize()
    torch.testing.assert_close(steps[-1], wanted)
    for step in range(16):
        assert torch.equal(steps[step + 1][:, :step], steps[step][:, :step])
    assert torch.equal(steps[0], weight)


def test_what_is_pushed_to_the_right_is_drawn_up_to_a_step() -> None:
    steps = draw.column_steps(normal(3, 8), torch.eye(8) + 0.5, Grid(2, 8, False))
    made = draw.pushed_errors(steps, 3, {"GPTQ": [0.1] * 9, "RTN": [0.2] * 9})
    assert title_of(made.axes[0]).startswith("3 of 8 columns rounded: RMS change ")
    change = np.asarray(made.axes[0].images[0].get_array())
    np.testing.assert_allclose(change, (steps[3] - steps[0]).numpy())
    drawn = [line for line in made.axes[1].lines if not str(line.get_label()).startswith("_")]
    assert [len(np.asarray(line.get_xdata())) for line in drawn] == [4, 4]
    png(made)
    last = draw.pushed_errors(steps, 8)
    assert title_of(last.axes[0]).endswith(" on the left")
    png(last)


def test_words_are_drawn_in_the_order_of_the_checkpoints() -> None:
    _, order = methods.WORD_ORDERS["AWQ"]
    word = sum(index << (4 * place) for place, index in enumerate(order))
    read = AwqMatrix("here", Groups(1, 1), torch.tensor([[word]], dtype=torch.int32), None, ONES)
    assert (read.dequantize() + 8).flatten().tolist() == list(range(8))
    made = draw.packed_words()
    assert texts(made.axes[0])[8:16] == ["0", "2", "4", "6", "1", "3", "5", "7"]
    png(made)


def test_the_map_has_each_matrix_and_its_bits() -> None:
    kinds = ("self_attn.q_proj", "mlp.down_proj")
    names = [f"model.layers.{layer}.{kind}.weight" for layer in (0, 1, 2) for kind in kinds]
    losses = {
        name: {"2": 0.1 * place + 0.1, "3": 0.01 * place + 0.01} for place, name in enumerate(names)
    }
    bits = {name: "3" if "down" in name else "2" for name in names}
    made = draw.sensitivity_map(losses, bits)
    image = np.asarray(made.axes[0].images[0].get_array())
    np.testing.assert_allclose(image, [[0.01, 0.03, 0.05], [0.02, 0.04, 0.06]])
    assert texts(made.axes[1]) == ["2", "2", "2", "3", "3", "3"]
    assert title_of(made.axes[1]) == "bits chosen: 3 at 2, 3 at 3"
    png(made)
    with pytest.raises(ValueError, match="is not the weight of a layer"):
        draw.sensitivity_map({"norm.weight": {"3": 0.1}}, {"norm.weight": "3"})


def test_the_knapsack_counts_where_greedy_is_optimal() -> None:
    rows = [
        {"bytes": 1000.0, "greedy": 0.5, "optimum": 0.5, "bound": 0.5},
        {"bytes": 2000.0, "greedy": 0.4, "optimum": 0.3, "bound": 0.25},
    ]
    made = draw.knapsack_curve(rows)
    assert title_of(made.axes[0]) == "The greedy choice equals the optimum at 1 of 2 sizes"
    png(made)


def test_the_largest_channels_of_keys_are_named() -> None:
    keys = normal(20, 16).sign()
    keys[:, 5] *= 8
    made = draw.cache_channels(keys, normal(20, 16).sign())
    assert title_of(made.axes[0]) == "keys: the largest channel is 8.0 times the median one"
    assert title_of(made.axes[1]) == "values: the largest channel is 1.0 times the median one"
    assert "5" in texts(made.axes[0])
    png(made)


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (1, [(0, 1), (0, 1), (0, 1)]),
        (4, [(0, 4), (0, 4), (4, 0)]),
        (9, [(8, 1), (1, 8), (8, 1)]),
        (16, [(16, 0), (8, 8), (16, 0)]),
    ],
)
def test_tokens_are_codes_or_in_full(count: int, said: list[tuple[int, int]]) -> None:
    made = draw.kept_tokens(count, residual=8, block_size=4, most=16)
    assert texts(made.axes[0]) == [f"{codes} codes, {full} in full" for codes, full in said]
    if count == 9:
        png(made)


def test_tokens_beyond_the_axis_are_refused() -> None:
    with pytest.raises(ValueError, match="1 to 16, not 17"):
        draw.kept_tokens(17, 8, 4, most=16)


def test_errors_of_the_cache_have_a_line_per_way() -> None:
    ways = {"keys per channel": {8: 0.01, 2: 0.2}, "keys per token": {8: 0.02, 2: 0.5}}
    made = draw.cache_errors(ways)
    assert [str(line.get_linestyle()) for line in made.axes[0].lines] == ["-", "--"]
    ticks = [each.get_text() for each in made.axes[0].get_xticklabels()]
    assert ticks == ["2", "8"]
    png(made)


def kept_in(num_bytes: int, divergence: float) -> dict[str, Any]:
    kl = {"value": divergence, "interval": [0.9 * divergence, 1.2 * divergence]}
    return {"bytes per token": num_bytes, "comparison": {"kl": kl}}


STORED: dict[str, dict[str, Any]] = {
    "axes": {
        kind: {
            "largest channel / median channel": [9.0],
            **{f"{b} bits": {"per channel": 0.5 / b, "per token": 0.9 / b} for b in (8, 4, 2)},
        }
        for kind in ("keys", "values")
    },
    "caches": {
        "float32": {"bytes per token": 46080},
        "fp8": kept_in(11700, 0.004),
        "int8": kept_in(13000, 0.0001),
        "int4": kept_in(7200, 0.01),
        "int2": kept_in(4300, 0.9),
    },
}


def test_stored_caches_are_drawn_with_their_savings() -> None:
    made = draw.stored_cache(STORED)
    assert [str(line.get_label()) for line in made.axes[0].lines] == [
        *("keys per channel", "keys per token", "values per channel", "values per token")
    ]
    assert "int2: 10.7 times smaller" in texts(made.axes[1])
    assert len(made.axes[1].texts) == 4
    png(made)


def test_slower_forms_are_orange_and_baselines_are_left_out() -> None:
    rows = {
        "int4": {"baseline": "int4", "speed": 1.0},
        "Q4_0 file": {"baseline": "int4", "speed": 1.02},
        "llama.cpp Q8_0": {"baseline": "int8", "speed": 0.8},
    }
    made = draw.decode_speeds(rows)
    assert [to_hex(each.get_facecolor()) for each in made.axes[0].patches] == [BLUE, ORANGE]
    assert texts(made.axes[0]) == ["1.02 of int4", "0.80 of int8"]
    png(made)


EXPLORABLES: dict[str, tuple[Callable[..., Figure], dict[str, Any], dict[str, Any]]] = {
    "outlier": (
        lambda outlier, per, bits: draw.outlier_histogram(normal(4, 64), outlier, per, bits),
        {"outlier": (4, 60, 2, 40), "per": list(weights.UNITS), "bits": [4, 8, 3, 2]},
        {"outlier": 10},
    ),
    "block": (
        lambda weight: draw.block_bits("Q4_K", random_block("Q4_K"), weight),
        {"weight": (0, 255, 1, 200)},
        {"weight": 255},
    ),
    "limit": (
        lambda limit: draw.size_and_quality(FORMS, limit),
        {"limit": (45, 165, 5, 85)},
        {"limit": 165},
    ),
}


@pytest.mark.parametrize("name", EXPLORABLES)
def test_an_explorable_leaves_a_picture_and_redraws(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[dict[str, Any]] = []
    monkeypatch.setattr(explorables, "display", lambda data, raw: shown.append(data))
    drawer, controls, moved = EXPLORABLES[name]
    explorables.explore(drawer, "A caption.", **controls)
    (output,) = shown
    before = base64.b64decode(output["image/png"])
    *made, sentence, image = _instances[output[explorables.WIDGET]["model_id"]].children
    assert image.value == before
    for control, key in zip(made, controls, strict=True):
        control.value = moved.get(key, control.value)
    assert image.value != before
    assert sentence.value == ""
