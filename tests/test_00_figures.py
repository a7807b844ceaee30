"""Chapter 0's figures: the lanes agree with the engine, and budgets are the sum of their parts."""

import math

import pytest

from minigen import LLM, SamplingParams
from minigen_course.ch00_map.figures import lanes, memory_budget, timeline
from minigen_course.lab.cost_model import (
    MODELS,
    config_of,
    kv_bytes_per_token,
    memory_needed,
    most_sequences,
    num_parameters,
)


@pytest.fixture(scope="module")
def events(tiny_directory):
    llm = LLM.load(tiny_directory, weights="float32", max_num_seqs=2, enable_prefix_caching=False)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (3, 5, 2)]
    with llm.record() as recorder:
        llm.generate([[5, 6, 7], [8, 9], [10, 11, 12, 13]], params, progress=False)
    return recorder.events


def test_a_lane_holds_every_computed_token_in_its_step(events) -> None:
    first, second, third = lanes(events).values()
    assert list(first.computed.values()) == [3, 1, 1]
    assert list(second.computed.values()) == [2, 1, 1, 1, 1]
    assert list(third.computed.values()) == [4, 1]
    assert min(third.computed) == max(first.computed) + 1, (
        "the third waits until the first has finished"
    )
    assert third.arrived == 0


def test_the_timeline_names_requests_and_counts_steps(events) -> None:
    (axes,) = timeline(events, ["a", "b", "c"]).axes
    assert axes.get_title(loc="left").startswith("5 steps, 2.0 requests")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "c"]
    with pytest.raises(ValueError, match="no requests"):
        timeline([])


@pytest.mark.parametrize(
    ("name", "billions"), [("Llama-2-7B", 6.74), ("Llama-3-8B", 8.03), ("Llama-3-70B", 70.55)]
)
def test_parameters_are_those_that_the_publishers_state(name: str, billions: float) -> None:
    assert round(num_parameters(config_of(name)) / 1e9, 2) == billions


@pytest.mark.model
def test_the_default_models_configuration_is_the_one_in_its_file(default_llm: LLM) -> None:
    ours = config_of("SmolLM2-135M")
    assert num_parameters(ours) == num_parameters(default_llm.config)
    assert kv_bytes_per_token(ours) == kv_bytes_per_token(default_llm.config)


@pytest.mark.parametrize("name", MODELS)
def test_the_largest_fitting_count_fits_and_one_more_does_not(name: str) -> None:
    config = config_of(name)
    count = most_sequences(config, 16, 200e9, 4096)
    assert memory_needed(config, 16, count, 4096).total <= 200e9
    assert memory_needed(config, 16, count + 1, 4096).total > 200e9


def test_the_bars_end_at_the_sum() -> None:
    config = config_of("Llama-3-8B")
    bars, curve = memory_budget(config, 16, 24, sequences=8, context=4096).axes
    end = max(patch.get_x() + patch.get_width() for patch in bars.patches)
    assert math.isclose(end * 1e9, memory_needed(config, 16, 8, 4096).total)
    assert bars.texts[0].get_text() == "fits, 2.6 GB left"
    assert "does not fit" in memory_budget(config, 16, 16, 8, 4096).axes[0].texts[0].get_text()
    assert curve.lines[0].get_ydata()[0] == most_sequences(config, 16, 24e9, 256)


def test_nonsense_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"Give one of SmolLM2-135M, .* config\.json"):
        config_of("a nice model")
    with pytest.raises(ValueError, match="more than 0 GB"):
        memory_budget(config_of("Llama-3-8B"), 16, 0, 1, 1)
