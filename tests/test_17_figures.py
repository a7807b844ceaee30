"""The step-time model follows from its arithmetic; figures show the given numbers."""

import pytest
import torch

from minigen.sampling.params import SamplingParams
from minigen_course.ch17_dense_cache.figures import (
    COMPUTED,
    EMPTY,
    READ,
    by_step,
    cache_filling,
    states,
    work_by_step,
)
from minigen_course.ch17_dense_cache.lesson import continue_dense
from minigen_course.ch17_dense_cache.reference import DenseCache
from minigen_course.figures.roofline import roofline, step_time
from minigen_course.grading.plug_in import using
from minigen_course.lab.cost_model import (
    MACHINES,
    SHAPES,
    Machine,
    Step,
    decode_step,
    measure_machine,
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


def test_this_machines_ceilings_are_positive() -> None:
    machine = measure_machine(megabytes=1, size=16)
    assert machine.bandwidth > 0
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


def test_the_bars_of_a_step_are_its_bytes_and_its_arithmetic_in_milliseconds() -> None:
    (axes,) = step_time(LLAMA_70B, H100, weight_bits=8, context=1000, batch=8).axes
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
