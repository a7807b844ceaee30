"""Chapter 0's figures: the lanes agree with the engine, and budgets are the sum of their parts."""

import math

import pytest
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from minigen import LLM, SamplingParams
from minigen_course import using
from minigen_course.ch00_map.diagrams import PROBLEMS, chapters_by_problem, five_problems, journey
from minigen_course.ch00_map.figures import (
    lanes,
    memory_budget,
    num_steps,
    one_request,
    queue,
    step_seconds,
    timeline,
)
from minigen_course.figures.style import AMBER
from minigen_course.lab import cost_model
from minigen_course.lab.cost_model import (
    MODELS,
    config_of,
    first_that_fit,
    kv_bytes_per_token,
    memory_needed,
    most_sequences,
    num_parameters,
)
from tools.chapters import read_chapters


@pytest.fixture(scope="module")
def llm(tiny_directory):
    return LLM.load(tiny_directory, weights="float32", max_num_seqs=2, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def events(llm):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (3, 5, 2)]
    with llm.record() as recorder:
        llm.generate([[5, 6, 7], [8, 9], [10, 11, 12, 13]], params, progress=False)
    return recorder.events


def bars_of(axes: Axes) -> list[Rectangle]:
    return [patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.get_width()]


def test_a_lane_holds_every_computed_token_in_its_step(events) -> None:
    first, second, third = lanes(events).values()
    assert list(first.computed.values()) == [3, 1, 1]
    assert list(second.computed.values()) == [2, 1, 1, 1, 1]
    assert list(third.computed.values()) == [4, 1]
    assert [len(lane.prefills) for lane in (first, second, third)] == [1, 1, 1]
    assert min(third.computed) == max(first.computed) + 1, (
        "the third waits until the first has finished"
    )
    assert third.arrived == 0


def test_a_prompt_of_one_token_is_a_prefill(llm) -> None:
    with llm.record() as recorder:
        llm.generate([5], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    (lane,) = lanes(recorder.events).values()
    assert lane.computed == {0: 1, 1: 1}
    assert lane.prefills == {0}


def test_the_timeline_names_requests_and_counts_steps_on_whole_numbers(events) -> None:
    (axes,) = timeline(events, ["a", "b", "c"]).axes
    assert axes.get_title(loc="left").startswith("5 steps: each reads the weights for 2.0 requests")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "c"]
    assert axes.get_xlabel() == "step of the engine"
    assert all(tick == round(tick) for tick in axes.get_xticks())
    assert num_steps(events) == len(step_seconds(events)) == 5
    with pytest.raises(ValueError, match="no requests"):
        timeline([])


def test_the_timeline_in_seconds_ends_with_the_last_step(events) -> None:
    (axes,) = timeline(events, in_seconds=True).axes
    end = axes.get_xlim()[1]
    assert axes.get_xlabel().startswith("seconds")
    assert end >= sum(step_seconds(events))
    assert max(bar.get_x() + bar.get_width() for bar in bars_of(axes)) <= end
    assert axes.get_yticklabels()[2].get_text() == "request 3"


def test_one_request_shows_its_steps_and_the_tokens_that_they_gave(llm, events) -> None:
    with llm.record() as recorder:
        llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    (axes,) = one_request(recorder.events, [" one", "two", "\n"]).axes
    texts = [text.get_text() for text in axes.texts]
    assert [each for each in texts if each in ("␣one", "two", "⏎")] == ["␣one", "two", "⏎"]
    assert "prefill: 3 tokens at once" in texts
    assert any("TTFT" in each for each in texts)
    assert len(bars_of(axes)) == 3
    with pytest.raises(ValueError, match="one request"):
        one_request(events, ["a"] * 5)


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
    assert first_that_fit(config, 16, 200e9, [4096] * (count + 1)) == count


def test_the_bars_end_at_the_sum_and_have_both_units() -> None:
    config = config_of("Llama-3-8B")
    drawn = memory_budget(config, 16, 24, sequences=8, context=4096)
    drawn.draw_without_rendering()
    bars, curve = drawn.axes
    end = max(patch.get_x() + patch.get_width() for patch in bars.patches)
    assert math.isclose(end * 1e9, memory_needed(config, 16, 8, 4096).total)
    assert bars.texts[0].get_text() == "fits, 2.6 GB left"
    assert "does not fit" in memory_budget(config, 16, 16, 8, 4096).axes[0].texts[0].get_text()
    (gibibytes,) = bars.child_axes
    low, high = gibibytes.get_xlim()
    assert math.isclose(high * 2**30, bars.get_xlim()[1] * 1e9)
    assert low == 0
    assert "8 × 4,096 tokens" in [text.get_text() for text in curve.texts]


def test_working_memory_counts_against_the_machine() -> None:
    config = config_of("Llama-3-8B")
    bars = memory_budget(config, 16, 24, 8, 4096, working_gb=4).axes[0]
    assert bars.texts[0].get_text() == "does not fit: 355 MB too much"


def half(config, bits, memory, context, working=1e9):
    return most_sequences(config, bits, memory, context, working) // 2


def test_the_curve_says_whose_function_draws_it(capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of("Llama-3-8B")
    by_argument = memory_budget(config, 16, 24, 8, 4096, most=half).axes[1]
    with using(0, most_sequences=half):
        in_use = memory_budget(config, 16, 24, 8, 4096).axes[1]
    with using(0, most_sequences=most_sequences):
        not_yet = memory_budget(config, 16, 24, 8, 4096).axes[1]
    for axes in (by_argument, in_use):
        assert axes.lines[0].get_ydata()[0] == half(config, 16, 24e9, 256)
        assert axes.get_title(loc="left") == "How many fit, by your function"
    assert not_yet.lines[0].get_ydata()[0] == most_sequences(config, 16, 24e9, 256)
    assert not_yet.get_title(loc="left") == "How many fit, by the course's function"
    assert capsys.readouterr().out.splitlines() == [
        "half, in place of most_sequences, was called 140 times",
        "the course's own most_sequences was called 140 times",
    ]


def test_a_queue_is_filled_by_the_part_in_use() -> None:
    config, lengths = config_of("Llama-3-8B"), [16_000, 8_000, 120_000, 4_000]

    def filled(drawn) -> int:
        amber = Rectangle((0, 0), 1, 1, facecolor=AMBER).get_facecolor()
        return sum(patch.get_facecolor() == amber for patch in drawn.axes[0].patches)

    def title_of(drawn) -> str:
        return drawn.axes[0].get_title(loc="left")

    drawn = queue(config, 4.5, 24, lengths)
    assert filled(drawn) == 2
    assert title_of(drawn).startswith("2 of 4 requests run (filled), by the course's function")
    with using(0, first_that_fit=lambda *sizes: cost_model.first_that_fit(*sizes) - 1):
        drawn = queue(config, 4.5, 24, lengths)
    assert filled(drawn) == 1
    assert title_of(drawn).startswith("1 of 4 requests run (filled), by your function")
    with pytest.raises(ValueError, match="no requests"):
        queue(config, 4.5, 24, [])


def test_nonsense_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"Give one of SmolLM2-135M, .* config\.json"):
        config_of("a nice model")
    with pytest.raises(ValueError, match="more than 0 GB"):
        memory_budget(config_of("Llama-3-8B"), 16, 0, 1, 1)


def test_the_journey_names_the_shapes_of_the_model() -> None:
    drawn = journey(config_of("Llama-3-8B"), "one two", [7, 8, 9], 42, " three")
    texts = [text.get_text() for text in drawn.axes[0].texts]
    assert texts.count("x [3, 4096]") == 2  # after the embedding, and after the layers
    assert any("[128256]" in each for each in texts)
    assert "32 layers" in texts
    assert any("42" in each for each in texts)
    assert any("␣three" in each for each in texts)


def test_every_chapter_solves_one_of_the_five_problems() -> None:
    solved = chapters_by_problem()
    assert list(solved) == list(PROBLEMS)
    numbers = [number for numbers in solved.values() for number in numbers]
    assert sorted(numbers) == [chapter.number for chapter in read_chapters()][1:]
    axes = five_problems().axes[0]
    assert set(numbers) < {text.get_text() for text in axes.texts}
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    for box in (each.get_bbox() for each in axes.patches if isinstance(each, Rectangle)):
        assert left <= box.x0 < box.x1 <= right
        assert bottom <= box.y0 < box.y1 <= top
