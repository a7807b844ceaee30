"""The comparison with other engines: what it asks, how it counts, and what a broken peer does."""

import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import loads as asked
from benchmarks.peers.__main__ import Comparison, print_table
from benchmarks.peers.answers import share_agreeing
from benchmarks.peers.engines import ENGINES, chosen
from benchmarks.peers.environments import RECIPES, requirements_of
from benchmarks.peers.loads import DECODE, MEMORY_ALONE, MIXED, START, UNITS, loads
from benchmarks.peers.processes import Moment, family, peak_memory
from benchmarks.peers.running import Turn, gathered, last_words
from benchmarks.peers.summary import figures, ratios, values
from benchmarks.peers.workers.static import in_batches
from tools import results as readme
from tools.chapters import ROOT

SURE = [{"prompt": [5, 6], "tokens": [6, 6]}, {"prompt": [7], "tokens": [7]}]
RIGHT = [each["tokens"] for each in SURE] * 2


def test_loads_are_the_same_for_the_same_seed_and_plain_data() -> None:
    assert loads(3) == loads(3) == json.loads(json.dumps(loads(3)))
    assert loads(3) != loads(4)


def test_no_two_prompts_share_a_beginning_that_a_prefix_cache_could_use() -> None:
    prompts = [
        tuple(request["prompt"][:16])
        for load in loads(3)
        for sample in load["samples"]
        for request in sample
    ]
    assert len(set(prompts)) == len(prompts)


def test_loads_have_the_sizes_that_they_are_named_after() -> None:
    by_name = {load["name"]: load["samples"] for load in loads(0)}
    sizes = {
        name: {(len(each["prompt"]), each["num_tokens"]) for sample in samples for each in sample}
        for name, samples in by_name.items()
    }
    assert sizes[DECODE] == {(64, 128)}
    assert sizes[asked.PREFILL_512] == {(512, 1)}
    assert sizes[asked.PREFILL_1024] == {(1024, 1)}
    assert sizes[asked.TOGETHER] == {(64, 64)}
    assert all(len(sample) == 32 for sample in by_name[asked.TOGETHER])
    assert len(by_name[MIXED][0]) == 128
    assert all(16 <= prompt <= 512 and 16 <= answer <= 128 for prompt, answer in sizes[MIXED])
    assert set(by_name) < set(UNITS)


def sample(load: str, seconds: float, foreign: float = 0.0, **more: Any) -> dict[str, Any]:
    return {"sample": load, "seconds": seconds, "foreign": foreign, **more}


def turn(*rates: float, foreign: float = 0.0) -> Turn:
    samples = [sample(DECODE, 1 / rate, foreign, tokens=1) for rate in rates]
    return Turn(samples, {MEMORY_ALONE: 5_000_000}, {}, RIGHT)


def test_disturbed_samples_are_set_aside_and_counted() -> None:
    quiet, loud = sample(START, 0.5, foreign=0.04), sample(START, 9.0, foreign=0.06)
    kept, set_aside = values([Turn([quiet, loud])])
    assert kept[START] == [0.5]
    assert set_aside == {**dict.fromkeys(UNITS, 0), START: 1}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_others_take_is_told_from_what_one_takes_oneself() -> None:
    before = Moment.now()
    deadline = before.clock + 0.3
    while time.monotonic() < deadline:
        pass
    own = before.foreign_since()
    earlier = Moment(before.clock, before.others - 0.3)  # as if others had worked as long
    assert earlier.foreign_since() > own


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_and_time_are_those_of_the_children_too() -> None:
    alone, before = family(), peak_memory()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert family() == [*alone, child.pid]
        assert peak_memory() > before
        child.kill()


def test_figures_are_medians_with_ranges_in_the_loads_unit() -> None:
    found = figures([turn(10, 30), turn(20)], SURE)
    assert found["loads"][DECODE] == {
        "unit": "tokens/s",
        "median": 20.0,
        "least": 10.0,
        "most": 30.0,
        "samples": 3,
        "set_aside": 0,
    }
    assert found["loads"][MEMORY_ALONE]["median"] == 5.0
    assert found["loads"][MIXED] == {"unit": "tokens/s", "samples": 0, "set_aside": 0}


def test_ratios_are_taken_within_rounds() -> None:
    """A round in which the machine is ten times as slow changes no ratio."""
    taken = {"minigen x": [turn(20), turn(2), turn(30)], "peer": [turn(10), turn(1), turn(10)]}
    assert ratios(taken)["minigen x"]["peer"][DECODE] == {
        "median": 2.0,
        "least": 2.0,
        "most": 3.0,
        "samples": 3,
    }


def test_a_round_without_an_undisturbed_sample_gives_no_ratio() -> None:
    taken = {"minigen x": [turn(20), turn(20)], "peer": [turn(10), turn(1, foreign=0.5)]}
    assert ratios(taken)["minigen x"]["peer"][DECODE]["samples"] == 1


def test_an_engine_with_other_answers_is_marked() -> None:
    assert share_agreeing(RIGHT, SURE) == 1.0
    wrong = Turn(answers=[[1, 1], [7], [1, 1], [1]])
    assert figures([Turn(answers=RIGHT)], SURE)["computes_the_model"]
    found = figures([Turn(answers=RIGHT), wrong], SURE)
    assert found["sure_answers_given"] == 0.25
    assert not found["computes_the_model"]


def test_static_batches_give_every_request_its_own_answer() -> None:
    requests = [{"prompt": [index] * (index % 3 + 1), "num_tokens": 1} for index in range(7)]
    sizes = []

    def answer(batch: list[asked.Request]) -> list[list[int]]:
        sizes.append(len(batch))
        return [each["prompt"][:1] for each in batch]

    assert in_batches(requests, 3, answer) == [[index] for index in range(7)]
    assert sizes == [3, 3, 1]


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    """Two rounds of five fakes, small loads."""
    if sys.platform != "linux":
        pytest.skip("workers read /proc")
    jobs = {
        name: {
            "command": [sys.executable, "-m", "tests.fake_peer"],
            "variables": {},
            "versions": {"fake": "1.0"},
            "model": "none",
            "weights": weights,
            "at_once": 2,
            "threads": 1,
        }
        for name, weights in {
            "minigen fake": "good",
            "minigen odd": "refuse",
            "broken": "crash",
            "lazy": "short",
            "good": "good",
        }.items()
    }
    made = Comparison(jobs, SURE, seed=1, scale=0.05)
    for round_id in range(2):
        made.run_round(round_id)
    return made


def test_a_fake_engine_goes_through_all_loads(comparison: Comparison) -> None:
    found = comparison.results()["engines"]["good"]
    assert found["computes_the_model"]
    assert found["versions"] == {"fake": "1.0", "mode": "fake"}
    counts = {load: each["samples"] + each["set_aside"] for load, each in found["loads"].items()}
    assert counts == {
        DECODE: 6,
        asked.PREFILL_512: 6,
        asked.PREFILL_1024: 4,
        asked.TOGETHER: 4,
        MIXED: 2,
        START: 2,
        MEMORY_ALONE: 2,
        asked.MEMORY_ALL: 2,
    }


def test_an_engine_that_fails_is_reported_in_a_sentence_and_the_others_go_on(
    comparison: Comparison, capsys: pytest.CaptureFixture[str]
) -> None:
    results = comparison.results()
    left_out = {
        name: found["left_out"] for name, found in results["engines"].items() if "left_out" in found
    }
    assert left_out == {
        "broken": "It ended with exit code 1: ValueError: the fake engine broke.",
        "minigen odd": "There are no such weights.",
        "lazy": "It ended with exit code 1: it answered with 2 tokens where 3 were asked for.",
    }
    assert {name: len(turns) for name, turns in comparison.turns.items()} == {
        "minigen fake": 2,
        "good": 2,
        "broken": 1,
        "minigen odd": 1,
        "lazy": 1,
    }
    assert list(results["ratios_of_minigen_to"]) == ["minigen fake"]
    assert list(results["ratios_of_minigen_to"]["minigen fake"]) == ["good"]
    print_table(results["engines"])
    assert "There are no such weights." in capsys.readouterr().out


def test_what_a_worker_told_before_it_broke_is_read() -> None:
    found = gathered('{"sample": "start", "seconds": 1, "foreign": 0}\n{"versions": {"a": "1"}}\n')
    assert found.versions == {"a": "1"}
    assert len(found.samples) == 1


def test_last_words_name_no_place_of_this_machine(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"first\ncannot open {Path.home()}/models/x.\n\n")
    assert last_words(log) == "cannot open ~/models/x"
    log.write_text("")
    assert last_words(log) == "no word of why"


def test_engines_can_be_chosen_by_the_beginning_of_their_names() -> None:
    assert chosen(None) == list(ENGINES)
    assert {engine.environment for engine in chosen("llama.cpp, vLLM")} == {"llama_cpp", "vllm_cpu"}
    assert all(engine.environment in {None, *RECIPES} for engine in ENGINES)
    assert len({engine.name for engine in ENGINES}) == len(ENGINES)


def test_a_wheels_requirements_are_read_without_its_extras(tmp_path: Path) -> None:
    wheel = tmp_path / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        text = 'Name: thing\nRequires-Dist: numpy>=1\nRequires-Dist: pandas; extra == "more"\n'
        archive.writestr("thing-1.0.dist-info/METADATA", text)
    assert requirements_of(wheel) == ["numpy>=1"]


def test_the_readme_shows_what_was_measured() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = text.split(readme.PEERS_BEGIN)[1].split(readme.PEERS_END)[0].strip()
    assert shown == readme.peers(), "run python -m tools.results"


def test_the_readmes_table_has_a_row_for_each_engine_and_says_who_is_left_out() -> None:
    engines = {
        "peer": figures([turn(1234)], SURE),
        "odd": {"left_out": "There are no such weights."},
    }
    measured = {
        "environment": {"cpu": "a processor"},
        "threads": 2,
        "rounds": 1,
        "engines": engines,
    }
    lines = readme.peers_table(measured).splitlines()
    assert "| peer | 1,234 | - | - | - | - | - | 5.00 | 100% |" in lines
    assert lines[-1] == "- odd is left out: There are no such weights."
