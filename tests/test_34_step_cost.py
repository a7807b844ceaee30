"""A step's predicted cost: bytes and operations, the constant, the figure; and a timed engine."""

import math
from pathlib import Path

import pytest
from step_cost import (
    Ceilings,
    Point,
    StepCost,
    Weights,
    Work,
    decode_work,
    predicted_seconds,
)
from step_cost_figures import step_cost

from minigen_course.lab.cost_model import ModelShape
from tools import results

SHAPE = ModelShape(
    hidden=64, layers=3, q_heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=304, tied=True
)
MACHINE = Ceilings(bandwidth=1e9, peaks={"int4": 4e9, "bfloat16": 2e9})


def test_a_part_takes_as_long_as_its_slower_side() -> None:
    assert Work("head", "int4", 3e9, 4e9).seconds(MACHINE) == pytest.approx(3)
    assert Work("head", "int4", 3e9, 20e9).seconds(MACHINE) == pytest.approx(5)
    assert Work("head", "bfloat16", 3e9, 20e9).seconds(MACHINE) == pytest.approx(10)
    with pytest.raises(KeyError):
        Work("head", "int8", 1, 1).seconds(MACHINE)


def test_weights_are_read_once_and_keys_and_values_per_sequence() -> None:
    weights = (Weights("layers", "int4", 1000, 1600),)
    layers, attention = decode_work(weights, SHAPE, sequences=5, context=7)
    assert (layers.num_bytes, layers.operations) == (1000, 2 * 1600 * 5)
    # Keys and values of 3 layers, 2 heads of 16, in two bytes; products with 4 heads' queries.
    assert attention.num_bytes == 5 * 7 * 3 * 2 * 2 * 16 * 2
    assert attention.operations == 5 * 7 * 3 * 2 * 2 * 4 * 16
    assert attention.kind == "bfloat16"


def test_the_times_of_parts_are_added() -> None:
    work = [Work("layers", "int4", 1e9, 8e9), Work("attention", "bfloat16", 3e9, 2e9)]
    assert predicted_seconds(work, MACHINE) == pytest.approx(2 + 3)


def cost() -> StepCost:
    return StepCost(
        (
            Point(1, 64, measured=0.010, predicted=0.006),
            Point(8, 64, measured=0.016, predicted=0.010),
            Point(1, 1024, measured=0.012, predicted=0.008),
            Point(8, 1024, measured=0.044, predicted=0.020),
        ),
        overhead=0.004,
    )


def test_a_ratio_excludes_the_constant() -> None:
    ratios = [cost().ratio(point) for point in cost().points]
    assert ratios == pytest.approx([1, 1.2, 1, 2])
    assert cost().worst() == cost().points[3]


def test_time_over_the_limit_is_divided_into_products_attention_and_the_rest() -> None:
    products = {1: 0.0, 8: 0.0015}
    (found,) = cost().beyond(1.5, products)
    assert (found["sequences"], found["context"]) == (8, 1024)
    assert found["ratio"] == pytest.approx(2)
    assert found["beyond_ms"] == pytest.approx(20)
    assert found["products_ms"] == pytest.approx(1.5)
    assert found["attention_ms"] == pytest.approx(28 - 10)
    assert found["rest_ms"] == pytest.approx(0.5)
    assert len(cost().beyond(1.1, products)) == 2


def test_points_come_back_from_json() -> None:
    again = StepCost.from_json(cost().as_json())
    assert again.overhead == pytest.approx(0.004)
    for one, other in zip(again.points, cost().points, strict=True):
        assert (one.sequences, one.context) == (other.sequences, other.context)
        assert one.measured == pytest.approx(other.measured)
        assert one.predicted == pytest.approx(other.predicted)
    assert cost().as_json()["worst"]["ratio"] == pytest.approx(2)


def test_the_figure_shows_measured_and_predicted_in_one_colour_per_context() -> None:
    left, right = step_cost({"bfloat16": cost(), "int4": cost()}).axes
    assert left.get_title(loc="left").startswith("bfloat16: at most 2.00 times its prediction")
    assert len(right.lines) == 4
    measured, predicted = left.lines[2:]
    assert list(measured.get_xdata()) == [1, 8]
    assert list(measured.get_ydata()) == pytest.approx([12, 44])
    assert list(predicted.get_ydata()) == pytest.approx([12, 24])
    assert measured.get_color() == predicted.get_color() != left.lines[0].get_color()
    with pytest.raises(ValueError, match="at least one point"):
        step_cost({"int4": StepCost((), 0.0)})


def test_readmes_line_counts_the_points_within_the_limit() -> None:
    forms = {"bfloat16": cost().as_json(), "int4": cost().as_json()}
    said = " ".join(results.cost_lines({"limit": 1.5, "forms": forms}))
    assert "6 of 8 decode steps, of 1 to 8 sequences and contexts up to 1,024" in said
    assert "1.5 times the time that their bytes" in said
    assert "the worst 2.0 times" in said


@pytest.mark.model
def test_a_loaded_engine_is_timed_with_its_prediction(default_model_path: Path) -> None:
    pytest.importorskip("numba")
    from step_timing import compiled_runner, decode_seconds, fill_cache, weights_of

    from minigen import LLM

    llm = LLM.load(
        default_model_path,
        weights="int4",
        num_blocks=8,
        max_num_seqs=4,
        enable_prefix_caching=False,
    )
    fill_cache(llm)
    manager = compiled_runner(llm).manager
    assert 0 < decode_seconds(llm, sequences=3, context=20) < math.inf
    with pytest.raises(ValueError, match="Too few rows or blocks for 3 sequences of 64 tokens"):
        decode_seconds(llm, sequences=3, context=64)
    assert not manager.rows
    assert manager.num_available == 8
    layers, head = weights_of(llm)
    shape = ModelShape.of(llm.config)
    assert layers.numbers + head.numbers == shape.multiplied
    assert layers.num_bytes == layers.numbers * 5 / 8  # 4 bits, and 32 for every 32 numbers
    assert head.num_bytes == head.numbers * 8.5 / 8
    assert (layers.kind, head.kind) == ("int4", "int8")
    plain = LLM.load(default_model_path, weights="float32", num_blocks=8)
    with pytest.raises(TypeError, match="compiled"):
        compiled_runner(plain)
