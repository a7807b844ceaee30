"""The step-time model follows from its arithmetic; figures show the given numbers."""

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch

from minigen.sampling.params import SamplingParams
from minigen_course.ch17_dense_cache.estimates import (
    compute_bound_batch,
    prefill_seconds,
    step_seconds,
)
from minigen_course.ch17_dense_cache.figures import (
    COMPUTED,
    EMPTY,
    READ,
    by_step,
    cache_filling,
    seconds_by_batch,
    speeds,
    states,
    time_parts,
    two_phases,
    work_by_step,
)
from minigen_course.ch17_dense_cache.lesson import (
    CEILING,
    COMPILED_STEP,
    PRODUCTS,
    best_in_turns,
    continue_dense,
    operator_calls,
    part_costs,
    products_of,
    read_speeds,
)
from minigen_course.ch17_dense_cache.reference import DenseCache
from minigen_course.figures.roofline import crossing, roofline, step_time
from minigen_course.grading.plug_in import using
from minigen_course.lab.cost_model import (
    MACHINES,
    SHAPES,
    Machine,
    Step,
    config_of,
    decode_step,
    measure_machine,
    most_sequences,
    prefill_step,
)
from minigen_course.lab.inspect_model import load_model

H100, LLAMA_70B = MACHINES["H100 SXM"], SHAPES["Llama-3-70B"]


def test_the_longer_of_memory_and_arithmetic_decides() -> None:
    machine = Machine("slow", bandwidth=10.0, flops=100.0)
    assert machine.ridge == 10
    assert Step(20, 10, 50).seconds(machine) == 3.0
    assert Step(20, 10, 900).seconds(machine, overhead=0.5) == 9.5
    assert Step(20, 10, 50).share_of_compute(machine) == pytest.approx(0.5 / 3)


def test_a_70b_model_in_8_bits_takes_21_ms_on_an_h100_and_little_of_its_arithmetic() -> None:
    step = decode_step(LLAMA_70B, batch=1, context=1, weight_bits=8)
    assert step.seconds(H100) == pytest.approx(21e-3, abs=0.5e-3)
    assert step.share_of_compute(H100) < 0.01
    assert round(H100.ridge) == 295


def test_a_prompt_of_one_token_is_a_decode_step() -> None:
    shape = SHAPES["SmolLM2-135M"]
    assert prefill_step(shape, 1, 32) == decode_step(shape, 1, 1, 32)


def test_a_prompts_operations_are_those_of_its_tokens_except_the_scores() -> None:
    shape = SHAPES["SmolLM2-135M"]
    tokens = sum(shape.flops(seen) for seen in range(1, 11))
    assert prefill_step(shape, 10, 32).flops == tokens - 9 * 2 * shape.vocab * shape.hidden


def test_a_machine_keeps_its_measured_bandwidth() -> None:
    machine = measure_machine(bandwidth=1e9, size=16)
    assert machine.bandwidth == 1e9
    assert machine.flops > 0


def test_without_a_cache_all_is_computed_and_with_one_only_what_is_new() -> None:
    assert states(2, 3, cached=False).tolist() == [
        [COMPUTED, COMPUTED, EMPTY, EMPTY],
        [COMPUTED, COMPUTED, COMPUTED, EMPTY],
        [COMPUTED, COMPUTED, COMPUTED, COMPUTED],
    ]
    assert states(2, 3, cached=True).tolist() == [
        [COMPUTED, COMPUTED, EMPTY, EMPTY],
        [READ, READ, COMPUTED, EMPTY],
        [READ, READ, READ, COMPUTED],
    ]


def test_the_drawing_shows_what_a_step_computes() -> None:
    left, right = cache_filling(list("abcdef"), 3, 2).axes
    assert left.get_title(loc="left") == "Without: step 2 computes 5; 12 so far"
    assert right.get_title(loc="left") == "With a cache: step 2 computes 1; 5 so far"
    with pytest.raises(ValueError, match=r"steps 0 to 2: there is no step 3\."):
        cache_filling(list("abcdef"), 3, 3)
    with pytest.raises(ValueError, match="60 tokens; at most 48"):
        cache_filling(["a"] * 60, 3, 3)


def test_lines_are_the_numbers_they_are_given() -> None:
    (axes,) = by_step({"a": [1, 2], "b": [3, 4]}, "seconds", "title").axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[1, 2], [3, 4]]
    left, right = work_by_step({"a": [1, 2]}, {"a": [5, 6]}).axes
    assert [list(each.lines[0].get_ydata()) for each in (left, right)] == [[1, 2], [5, 6]]


def test_a_step_is_drawn_at_its_intensity_and_speed() -> None:
    step = Step(weight_bytes=4e9, kv_bytes=0, flops=2e9)
    (axes,) = roofline(H100, {"decode": (step, 0.5)}).axes
    assert [(float(p.get_xdata()[0]), float(p.get_ydata()[0])) for p in axes.lines[3:]] == [
        (0.5, 4.0)
    ]


@pytest.mark.parametrize("seconds", [1e-4, 0.05, 0.5, 30.0])
@pytest.mark.parametrize("machine", [H100, Machine("laptop", 30e9, 200e9), Machine("", 1e9, 1e9)])
def test_every_named_point_and_the_ridge_are_inside_the_axes(
    machine: Machine, seconds: float
) -> None:
    shape = SHAPES["SmolLM2-135M"]
    placed = {f"{n}": (prefill_step(shape, n, 32), seconds * n**0.5) for n in (1, 2, 16, 256)}
    (axes,) = roofline(machine, {"decode": (prefill_step(shape, 1, 32), seconds)} | placed).axes
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    points = [(float(p.get_xdata()[0]), float(p.get_ydata()[0])) for p in axes.lines[3:]]
    assert len(points) == 5
    assert all(left < x < right and low < y < high for x, y in points)
    assert left < machine.ridge < right
    assert low < machine.flops / 1e9 < high
    assert {"decode", "1", "2", "16", "256"} <= {each.get_text() for each in axes.texts}


def test_the_rooflines_axes_name_arithmetic_intensity_and_the_gap_is_shaded() -> None:
    step, other = Step(4e9, 0, 2e9), Step(4e9, 0, 2e11)
    (axes,) = roofline(H100, {"a": (step, 0.5), "b": (other, 0.5)}).axes
    assert axes.get_xlabel() == "arithmetic intensity (FLOP/byte, log scale)"
    assert axes.get_ylabel() == "GFLOP/s (log scale)"
    assert len(axes.collections) == 1
    assert "what is lost" in [each.get_text() for each in axes.texts]


def test_a_batch_is_compute_bound_where_both_times_are_equal() -> None:
    shape, card = SHAPES["Llama-3-8B"], MACHINES["L4"]
    found = crossing(shape, card, 16, 100)
    assert found is not None
    step = decode_step(shape, 1, 100, 16)
    read = (step.weight_bytes + found * step.kv_bytes) / card.bandwidth
    assert found * step.flops / card.flops == pytest.approx(read)
    assert compute_bound_batch(100) == math.ceil(found)
    assert crossing(shape, card, 16, 1000) is None
    assert compute_bound_batch(1000) is None


def test_the_estimates_are_those_of_the_cost_model() -> None:
    for name, shape in SHAPES.items():
        sizes = {
            "weights": shape.multiplied,
            "layers": shape.layers,
            "q_heads": shape.q_heads,
            "kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "bandwidth": H100.bandwidth,
            "peak": H100.flops,
            "weight_bits": 8,
            "overhead": 1e-3,
        }
        found = step_seconds(batch=7, context=900, **sizes)  # type: ignore[arg-type]
        assert found == pytest.approx(decode_step(shape, 7, 900, 8).seconds(H100, 1e-3)), name
        head = shape.vocab * shape.hidden
        first = prefill_seconds(head=head, prompt_tokens=900, **sizes)  # type: ignore[arg-type]
        assert first == pytest.approx(prefill_step(shape, 900, 8).seconds(H100, 1e-3)), name


def test_the_stored_step_is_the_benchmarks() -> None:
    path = Path(__file__).parents[1] / "benchmarks" / "results" / "34_step_cost.json"
    stored = json.loads(path.read_text(encoding="utf-8"))["forms"]["bfloat16"]
    (point,) = (
        each
        for each in stored["points"]
        if (each["sequences"], each["context"]) == (1, COMPILED_STEP.context)
    )
    assert COMPILED_STEP.seconds == pytest.approx(point["measured_ms"] / 1e3, rel=0.2)
    assert COMPILED_STEP.reading == pytest.approx(point["predicted_ms"] / 1e3, rel=0.2)


def test_shares_of_a_step_sum_to_a_hundred_and_lost_parts_are_not_negative() -> None:
    (axes,) = time_parts({"a": {"read": 1.0, "slow": 3.0}, "b": {"read": 2.0, "slow": -1.0}}).axes
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == pytest.approx([25, 75, 100, 0])


def test_steps_by_batch_show_the_exercises_functions() -> None:
    contexts = [1, 1000]

    def half(**given: float) -> float:
        return step_seconds(**given) / 2  # type: ignore[arg-type]

    (own,) = seconds_by_batch(contexts).axes
    with using(17, step_seconds=half, compute_bound_batch=lambda context: 7):
        (theirs,) = seconds_by_batch(contexts).axes
    assert theirs.lines[0].get_ydata()[0] == pytest.approx(own.lines[0].get_ydata()[0] / 2)
    solid, dashed, dot = theirs.lines[:3]
    assert (dashed.get_linestyle(), dot.get_marker()) == ("--", "o")
    room = most_sequences(config_of("Llama-3-8B"), 16, 24e9, 1)
    assert max(solid.get_xdata()) <= room
    assert len(theirs.lines) == 6
    assert len(own.lines) == 5
    assert "never compute-bound" in own.get_legend_handles_labels()[1][1]


def test_functions_are_timed_in_turns() -> None:
    called: list[str] = []
    runs = {name: partial(called.append, name) for name in "ab"}
    found = best_in_turns(runs, rounds=2)
    assert called == list("ababab")
    assert 0 <= found["a"] < 60
    assert list(found) == ["a", "b"]


def test_both_phases_are_drawn_with_their_shapes() -> None:
    prefill, decode = two_phases(5, config_of("SmolLM2-135M")).axes
    assert "q [5, 9, 64]" in [each.get_text() for each in prefill.texts]
    assert "[9, 1, 6] weights" in [each.get_text() for each in decode.texts]
    assert decode.get_title(loc="left") == "Decode: 1 token computed, 5 read from the cache"


def test_no_product_is_above_the_ceiling() -> None:
    found = read_speeds((1, 2), rounds=2)
    ceiling, *products = found.values()
    assert list(found) == [CEILING, *PRODUCTS]
    assert all(top >= low > 0 for each in products for top, low in zip(ceiling, each, strict=True))


def test_the_ceiling_and_the_products_are_drawn_as_they_were_measured() -> None:
    (axes,) = speeds([1, 4], {"ceiling": [9, 8], "long rows": [7, 6], "short": [3, 2]}).axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[9, 8], [7, 6], [3, 2]]


def test_the_bars_of_a_step_are_its_bytes_and_its_arithmetic_in_milliseconds() -> None:
    axes, curves = step_time(LLAMA_70B, H100, weight_bits=8, context=1000, batch=8).axes
    assert "Compute-bound from batch 458 on" in curves.get_title(loc="left")
    step = decode_step(LLAMA_70B, 8, 1000, 8)
    assert [bar.get_width() for bar in axes.patches] == pytest.approx(
        [
            1e3 * step.weight_bytes / H100.bandwidth,
            1e3 * step.kv_bytes / H100.bandwidth,
            1e3 * step.flops / H100.flops,
        ]
    )
    assert "does not fit" in step_time(LLAMA_70B, H100, weight_bits=16, context=1, batch=1).axes[
        0
    ].get_title(loc="left")
    with pytest.raises(ValueError, match="at least one sequence"):
        step_time(LLAMA_70B, H100, weight_bits=8, context=1, batch=0)


@pytest.mark.model
def test_the_dense_runner_alone_writes_what_the_engine_writes_and_uses_a_learners_cache() -> None:
    llm = load_model(weights="float32")
    stored = []

    class Mine(DenseCache):
        def store(self, layer_id: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            stored.append(len(k))
            return super().store(layer_id, k, v)

    with using(17, DenseCache=Mine):
        dense = continue_dense(llm, "Tea is", 6)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    assert dense == llm.generate("Tea is", params).token_ids
    assert len(stored) == 6 * llm.config.num_layers
    assert set(stored[llm.config.num_layers :]) == {1}


@pytest.mark.model
def test_the_parts_of_a_step_add_up_to_its_bytes_and_operations() -> None:
    llm = load_model(weights="float32")
    shape = SHAPES["SmolLM2-135M"]
    parts = {name: step for name, (step, _) in part_costs(llm, 1, 64).items()}
    whole = decode_step(shape, 1, 64, 32, 32)
    assert part_costs(llm, 2, 64)["output head"][0] == parts["output head"], "the last token only"
    assert parts["feed-forward"].intensity == parts["output head"].intensity == 0.5
    products = ("attention's products", "feed-forward", "output head")
    assert sum(parts[name].weight_bytes for name in products) == whole.weight_bytes
    assert parts["attention's context"].kv_bytes == whole.kv_bytes
    counted = sum(parts[name].flops for name in (*products, "attention's context"))
    assert counted == whole.flops
    assert operator_calls(products_of(llm, 1)) >= 4 * shape.layers + 1
