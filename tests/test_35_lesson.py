"""Chapter 35's own code: formats of one matrix, checkpoints' words, inputs, caches, results."""

import json
from pathlib import Path

import pytest
import torch

from minigen import LLM
from minigen.checkpoint.checkpoint import Checkpoint, open_checkpoint
from minigen.quantization.awq import awq
from minigen.quantization.calibration import SharedInput
from minigen.quantization.grid import Grid, relative_error, round_to_nearest
from minigen_course.ch35_quantization import figures, lesson
from minigen_course.ch35_quantization.lesson.model import Probe
from minigen_course.ch35_quantization.lesson.stored import FILE, model_bytes

FOUR = Grid(4, 32, symmetric=False)
NAMES = ("Q8_0", "Q4_1", "Q4_K", "NF4", "FP8 e4m3", "FP8 e5m2", "MXFP4")
TEXT = "held-out topics"


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    return torch.randn(128, 256, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def checkpoint(tiny_directory: Path) -> Checkpoint:
    return open_checkpoint(tiny_directory)


@pytest.fixture(scope="module")
def llm(tiny_directory: Path) -> LLM:
    return LLM.load(tiny_directory, weights="float32", block_size=32, num_blocks=8)


def windows(seed: int, count: int = 4) -> list[torch.Tensor]:
    return [
        torch.randint(5, 60, (32,), generator=torch.Generator().manual_seed(seed + each))
        for each in range(count)
    ]


@pytest.fixture(scope="module")
def inputs(checkpoint: Checkpoint) -> dict[str, SharedInput]:
    return lesson.inputs_of(checkpoint, windows(0), 1)


# One matrix


def test_more_bits_are_nearer_and_finer_floats_are_nearer(weight: torch.Tensor) -> None:
    found = lesson.bits_and_error(weight, NAMES)
    errors = {name: error for name, (_, error) in found.items()}
    assert errors["Q8_0"] < errors["FP8 e4m3"] < errors["FP8 e5m2"] < errors["Q4_K"]
    assert errors["Q4_K"] < errors["Q4_1"] < errors["MXFP4"]
    assert {name: bits for name, (bits, _) in found.items()}["Q4_K"] == 4.5


@pytest.mark.parametrize("name", NAMES)
def test_the_first_block_is_that_of_the_format(weight: torch.Tensor, name: str) -> None:
    form, block = figures.FORMATS[name], lesson.first_block(weight, name)
    if name.startswith("FP8"):
        assert len(block) == 32
    else:
        assert 8 * len(block) == form.bits_per_weight * form.num_weights


def test_smaller_groups_take_more_bits_and_are_nearer(weight: torch.Tensor) -> None:
    found = list(lesson.group_table(weight, 4, (-1, 128, 64, 32)).values())
    assert sorted(found, key=lambda each: each[0]) == found
    assert sorted(found, key=lambda each: -each[1]) == found
    assert found[-1][0] == 4 + 20 / 32


def test_a_matrix_on_the_grid_costs_nothing(weight: torch.Tensor) -> None:
    on_grid = lesson.in_form(weight, "Q4_1")
    found = lesson.errors_by_form(on_grid)
    assert found["4 bits, groups of 32, any minimum"] < 1e-3 < found["4 bits, groups of 64"]
    assert lesson.errors_by_form(weight)["4 bits, groups of 32, any minimum"] > 0.05


# Words of checkpoints


def test_checkpoints_read_back_what_was_written(weight: torch.Tensor) -> None:
    matrix = round_to_nearest(weight, FOUR)
    truth = matrix.dequantize()
    for each in (lesson.as_gptq(matrix, 1), lesson.as_gptq(matrix, 2), lesson.as_awq(matrix)):
        assert torch.equal(each.dequantize(), truth)


def test_a_mistaken_convention_reads_other_weights(weight: torch.Tensor) -> None:
    matrix = round_to_nearest(weight, FOUR)
    truth = matrix.dequantize()
    for wrong in (
        lesson.as_gptq(matrix, 1, read_as=2),
        lesson.as_gptq(matrix, 2, read_as=1),
        lesson.as_awq(matrix, lesson.IN_ORDER),
    ):
        assert relative_error(truth, wrong.dequantize()) > 0.1


def test_a_word_has_its_first_code_lowest() -> None:
    codes = torch.arange(8, dtype=torch.uint8).unsqueeze(0)
    assert lesson.words_of(codes).item() == 0x76543210
    assert lesson.words_of(15 - codes).item() == 0x89ABCDEF - 2**32  # the sign bit is a code's
    assert lesson.words_of(codes, lesson.AWQ_ORDER).item() == 0x75316420


# Inputs and methods


def test_texts_that_are_measured_are_not_those_that_calibrate() -> None:
    texts = lesson.texts()
    seen = {each.strip() for each in texts["seen"].split("\n\n")}
    assert not seen & {each.strip() for each in texts[TEXT].split("\n\n")}
    assert len(texts["seen"]) > 100_000


def test_the_four_inputs_of_a_layer_have_its_matrices(inputs: dict[str, SharedInput]) -> None:
    assert list(inputs) == ["qkv", "out", "gate_up", "down"]
    assert {each.statistics.num_tokens for each in inputs.values()} == {4 * 32}
    assert [len(each.weights) for each in inputs.values()] == [3, 1, 2, 1]
    assert all(".layers.1." in name for each in inputs.values() for name in each.weights)


def test_methods_have_smaller_errors_on_what_they_saw(
    checkpoint: Checkpoint, inputs: dict[str, SharedInput]
) -> None:
    grid = Grid(3, 16, symmetric=False)
    for shared in inputs.values():
        found = {
            method: lesson.output_error(shared, lesson.rounded_by(method, shared, grid, checkpoint))
            for method in lesson.METHODS
        }
        assert found["AWQ"] <= found["RTN"]
        assert found["GPTQ"] <= found["RTN"]


def test_the_search_starts_at_rounding_to_nearest(
    checkpoint: Checkpoint, inputs: dict[str, SharedInput]
) -> None:
    grid, shared = Grid(3, 16, symmetric=False), inputs["qkv"]
    errors = lesson.search_errors(shared, grid, [step / 20 for step in range(20)])
    found = awq(shared.weights, shared.statistics, grid, clip_search=False)
    assert errors[0] == pytest.approx(found.nearest_error)
    assert min(errors) == pytest.approx(found.error)


def test_smoothing_helps_where_a_channel_is_large(llm: LLM, inputs: dict[str, SharedInput]) -> None:
    x = lesson.qkv_inputs(llm, "a text of a few words " * 4, 1, 24)
    assert x.shape == (24, llm.config.hidden)
    shared, large = inputs["qkv"], torch.ones(llm.config.hidden)
    large[0] = 200
    x, shared.statistics.max_abs = x * large, shared.statistics.max_abs * large
    plain, smooth = (lesson.int8_output_error(shared, x, alpha) for alpha in (None, 0.5))
    assert smooth < plain


def test_steps_of_columns_end_at_the_rounded_matrix(weight: torch.Tensor) -> None:
    part, hessian = weight[:4, :32], torch.eye(32)
    steps = lesson.plain_steps(part, FOUR)
    assert torch.equal(steps[0], part)
    assert torch.equal(steps[-1], round_to_nearest(part, FOUR).dequantize())
    errors = lesson.step_errors(steps, part, hessian)
    assert errors[0] == 0
    assert errors == sorted(errors)
    assert errors[-1] == pytest.approx(relative_error(part, steps[-1]), rel=1e-4)


# The model


def test_a_probe_finds_no_divergence_of_the_model_itself(llm: LLM) -> None:
    probe = Probe(llm, windows(0)[0].tolist(), 1)
    assert probe.divergence({}) == 0
    assert probe.divergence(probe.weights) < 1e-6
    noisy = {"v": probe.weights["v"] + torch.randn_like(probe.weights["v"])}
    assert probe.divergence(noisy) > 1e-4


def test_sensitivities_and_sizes_are_those_of_six_matrices(llm: LLM) -> None:
    choices = lesson.sensitivities(llm, windows(0)[0].tolist(), 1, (2, 4), group_size=16)
    assert list(choices) == ["q", "k", "v", "out", "gate", "down"]
    assert all(two.num_bytes < four.num_bytes for two, four in choices.values())
    for each in lesson.by_size(choices):
        assert each["bound"] <= each["optimum"] * (1 + 1e-9) + 1e-12
        assert each["optimum"] <= each["greedy"] * (1 + 1e-9) + 1e-12


def test_errors_of_a_cache_fall_with_bits(llm: LLM) -> None:
    layers = lesson.keys_and_values(llm, windows(0)[0].tolist())
    assert len(layers) == llm.config.num_layers
    for by_bits in lesson.cache_errors(layers).values():
        assert by_bits[8] < by_bits[4] < by_bits[2]


def test_a_cache_is_compared_with_one_in_full_precision(llm: LLM, tiny_directory: Path) -> None:
    ids = torch.cat(windows(0)).tolist()[:96]
    plain, coded = (
        LLM.load(
            tiny_directory, weights="float32", kv_cache_dtype=each, block_size=32, num_blocks=8
        )
        for each in ("auto", "int2")
    )
    in_full = lesson.kept_rows(llm, ids)
    assert lesson.cache_quality(plain, in_full, ids) == (pytest.approx(0, abs=1e-6), 1.0)
    assert lesson.cache_quality(coded, in_full, ids)[0] > 0
    assert lesson.kv_bytes(coded) < lesson.kv_bytes(llm) / 2


def test_speed_is_measured_for_every_engine(llm: LLM) -> None:
    found = lesson.tokens_per_second({"one": llm}, count=4, turns=1)
    assert set(found) == {"one"}
    assert found["one"] > 0


# Stored results


def quality(perplexity: float, kl: float) -> dict[str, dict[str, object]]:
    span = [perplexity - 1, perplexity + 1]
    return {TEXT: {"perplexity": perplexity, "perplexity interval": span, "kl divergence": kl}}


def results(verdict: str) -> dict[str, object]:
    pairs = {
        pair: {"kl divergence": {"verdict": verdict}}
        for pair in ("RTN - AWQ", "AWQ - GPTQ", "RTN - GPTQ")
    }
    methods = {
        "none": quality(10, 0),
        "RTN, 4 bits": quality(12, 0.3),
        "AWQ, 4 bits": quality(11, 0.1),
        "GPTQ, 4 bits": quality(11.5, 0.2),
        "order at 4 bits": {TEXT: pairs},
    }
    return {"methods": methods, "codes": {"NF4": quality(11, 0.1)}}


def test_stored_results_are_read_part_by_part(tmp_path: Path) -> None:
    assert lesson.stored("35_quantization", "methods", folder=tmp_path) is None
    (tmp_path / "35_quantization.json").write_text(json.dumps(results("larger")), "utf-8")
    methods = lesson.stored("35_quantization", "methods", folder=tmp_path)
    assert lesson.stored("35_quantization", "mixed", "bits", folder=tmp_path) is None
    assert lesson.rise(methods, "RTN, 4 bits", TEXT) == pytest.approx(20)
    assert lesson.order_at(methods, 4, TEXT) == "RTN > GPTQ > AWQ"
    assert lesson.order_at(methods, 3, TEXT) is None
    unsure = results("undecided")["methods"]
    assert isinstance(unsure, dict)
    assert lesson.order_at(unsure, 4, TEXT) == "RTN ~ GPTQ ~ AWQ"


def test_forms_have_their_bytes_and_what_was_measured(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    (tmp_path / "35_quantization.json").write_text(json.dumps(results("larger")), "utf-8")
    speeds = lesson.scaled_speeds(
        {"int4": 100.0, "int8": 50.0},
        {"8 bits, whole rows": {"baseline": "int8", "speed": 0.9}},
    )
    grid_free = model_bytes(checkpoint, lambda rows, columns: 0)
    rows = {
        each.name: each for each in lesson.forms(checkpoint, TEXT, speeds, tmp_path, group_size=16)
    }
    assert rows[FILE].tokens_per_second == 100
    assert rows["int8 (W8A8)"].tokens_per_second == 45
    assert rows["RTN, 4 bits"].perplexity == 12
    assert rows["RTN, 3 bits"].perplexity is None
    assert (rows["NF4"].low, rows["NF4"].high) == (10, 12)
    assert grid_free < rows["RTN, 2 bits"].num_bytes < rows["RTN, 4 bits"].num_bytes
    assert rows["RTN, 4 bits"].num_bytes < rows["int8 (W8A8)"].num_bytes


def test_a_figure_of_missing_results_says_how_to_measure() -> None:
    made = lesson.drawn(lambda: pytest.fail("nothing to draw"), "35_quantization", None)
    assert "python benchmarks/35_quantization.py" in made.axes[0].texts[0].get_text()
    drawn = made
    assert lesson.drawn(lambda: drawn, "35_quantization", {"some": 1}) is drawn


def test_errors_of_seen_and_unseen_texts_have_a_bar_each() -> None:
    by_text = {"seen": 0.1, TEXT: 0.2, "Alice": 0.3}
    made = figures.seen_and_unseen({"8 windows": {"RTN": by_text, "GPTQ": by_text}})
    (axes,) = made.axes
    assert [round(bar.get_bbox().height) for bar in axes.patches] == [10, 20, 30] * 2  # type: ignore[attr-defined]
    assert [text.get_text() for text in axes.texts] == ["10", "20", "30"] * 2


def test_columns_are_rounded_as_the_matrix_is(weight: torch.Tensor) -> None:
    rounded = lesson.column_rounder(weight, FOUR)
    columns = torch.stack([rounded(weight[:, i], i) for i in range(weight.shape[1])], dim=1)
    assert torch.equal(columns, round_to_nearest(weight, FOUR).dequantize())


def test_a_first_token_that_counts_more_is_less_wrong(llm: LLM) -> None:
    texts = dict.fromkeys(("seen", TEXT), "abcdefgh" * 40)  # all windows are alike
    grid = Grid(3, 16, symmetric=False)
    found = lesson.first_token_errors(llm, texts, 1, grid, (1, 1000), length=16)
    assert list(found) == ["RTN", "GPTQ, first x 1", "GPTQ, first x 1000"]
    once, often = (found[f"GPTQ, first x {count}"][0] for count in (1, 1000))
    assert often < once


def test_rounding_six_matrices_of_a_layer_changes_the_model(llm: LLM) -> None:
    ids = windows(0)[0].tolist()
    assert lesson.layer_divergence(llm, ids, 1, lambda each: each) < 1e-6
    assert lesson.layer_divergence(llm, ids, 1, torch.zeros_like) > 1e-4
