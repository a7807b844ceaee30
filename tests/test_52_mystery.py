"""The mystery servers: each has one fault, one kind of cure, and a tempting knob that is none."""

import pytest

from minigen_course.ch52_slo.exercises import diagnosis_of_seed
from minigen_course.ch52_slo.lesson import LAYERS, RESOURCES
from minigen_course.ch52_slo.mystery import (
    FLAGS,
    NEAR,
    Diagnosis,
    diagnose,
    goal_of,
    goodput_of,
    layer_of,
    mystery,
    mystery_system,
    read_knob,
    treated,
    try_knob,
    vitals_of,
)
from minigen_course.grading.exercise import Wrong

SEEDS = range(1, 7)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_packages_diagnosis_cures_and_a_full_queue_does_not(seed: int) -> None:
    found = diagnose(seed)
    assert found.resource in RESOURCES
    assert found.layer in LAYERS
    assert layer_of(found.knob) == found.layer
    assert goal_of(seed) == pytest.approx(NEAR * goodput_of(seed, found.knob), abs=0.006)
    assert goal_of(seed) > 1.1 * goodput_of(seed)
    assert goodput_of(seed, "--max-queue 4") < goal_of(seed), "the decoy of another layer"


def test_a_wrong_layer_that_only_refuses_is_no_diagnosis() -> None:
    decoy = Diagnosis("blocks", "gateway", "--max-in-flight-per-key 20")
    assert goodput_of(6, decoy.knob) >= goal_of(6), "by refusing, it reaches the goal"
    assert layer_of(decoy.knob) == decoy.layer
    with pytest.raises(Wrong, match="another one than gateway"):
        diagnosis_of_seed(6)(lambda seed: decoy)


def test_every_resource_that_a_setting_relieves_is_a_fault_once() -> None:
    found = [diagnose(seed).resource for seed in SEEDS]
    assert set(found) == set(RESOURCES) - {"bandwidth"}
    assert len({diagnose(seed).knob.split()[0] for seed in SEEDS}) == 6


def test_two_servers_are_slow_with_much_memory_free() -> None:
    for seed in (2, 3):
        vitals = vitals_of(seed)
        assert vitals.most_kv < 0.7
        assert vitals.kept < 0.1
        assert goodput_of(seed, "--kv-cache-dtype int8") == pytest.approx(goodput_of(seed), abs=0.1)


def test_gauges_show_the_fault_of_each_resource() -> None:
    assert vitals_of(1).most_running == 16
    assert vitals_of(1).most_waiting > 20
    assert min(vitals_of(seed).most_arithmetic for seed in (2, 3)) > 0.8
    assert vitals_of(4).kept_itl < 0.2 < 0.9 < vitals_of(4).kept_ttft
    assert vitals_of(5).running < 0.4 * mystery_system(5).knobs.max_num_seqs
    assert vitals_of(6).preemptions > 0
    assert vitals_of(6).most_kv == 1


def test_servers_are_printed_side_by_side_without_their_faults(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mystery(1, 3)
    shown = capsys.readouterr().out
    assert "1: minigen serve --scheduler continuous --max-num-seqs 16" in shown
    assert "prompt tokens, largest key" in shown
    assert "arithmetic used, at most" in shown
    assert "batch slots" not in shown


def test_a_knob_is_tried_and_compared_with_the_goal(capsys: pytest.CaptureFixture[str]) -> None:
    try_knob(1, "--max-queue 4")
    shown = capsys.readouterr().out
    assert "gateway" not in shown, "the layer is for the learner to name"
    assert "not reached" in shown
    assert "* refused (429)" in shown
    try_knob(1, "--max-num-seqs 64")
    assert "second: reached" in capsys.readouterr().out


def test_knobs_are_read_as_flags_with_values() -> None:
    assert read_knob("--max-num-seqs 64") == ("--max-num-seqs", 64)
    assert read_knob("--no-enable-prefix-caching") == ("--no-enable-prefix-caching", False)
    assert read_knob("--scheduler dynamic") == ("--scheduler", "dynamic")
    for wrong in (
        *("", "64", "--max-num-seqs", "--max-num-seqs many", "--max-num-seqs 0"),
        *("--max-num-seqs 4 5", "--enable-prefix-caching 1", "--kv-cache-dtype int4"),
        *("--num-blocks 3301", "--more-memory 3", "--max-num-seqs 4097", "--max-num-seqs ²"),
    ):
        with pytest.raises(ValueError, match="should"):
            read_knob(wrong)
    with pytest.raises(ValueError, match="does not fit into 20 blocks"):
        treated(6, "--num-blocks 20")
    with pytest.raises(ValueError, match="no 7"):
        mystery_system(7)


def test_every_flag_of_the_menu_is_a_flag_of_the_server() -> None:
    from tools.chapters import ROOT

    documented = (ROOT / "docs" / "cli.md").read_text("utf-8")
    assert all(f"`{flag}" in documented for flag in FLAGS)


@pytest.mark.parametrize("seed", SEEDS)
def test_odd_flags_do_not_give_the_fault_away(seed: int) -> None:
    usual = {
        "--max-num-seqs 64": {"max_num_seqs": 64},
        "--max-num-batched-tokens 2048": {"max_num_batched_tokens": 2048},
        "--num-blocks 3300": {"num_blocks": 3300},
        "--enable-prefix-caching": {"enable_prefix_caching": True},
    }
    knobs, cure = mystery_system(seed).knobs, diagnose(seed).knob.split()[0]
    odd = [knob for knob, value in usual.items() if vars(knobs) | value != vars(knobs)]
    harmless = [knob for knob in odd if knob.split()[0] != cure]
    assert len(harmless) >= 2
    for knob in harmless:
        assert goodput_of(seed, knob) < goal_of(seed), f"{knob} is no cure"
