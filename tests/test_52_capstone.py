"""The capstone's score counts bytes and FLOPs, and each rung of the ladder pays."""

import math
from dataclasses import replace

import pytest

from minigen_course.ch52_slo.capstone import (
    MUST_KEEP,
    Meter,
    Plan,
    climb,
    most_blocks,
    package_plan,
    score_of,
    trace_of,
)
from minigen_course.lab.simulator import CARD, Ask, Knobs, simulate


def test_a_meter_takes_the_cards_time_and_counts_what_it_reads_and_computes() -> None:
    load, meter = [Ask.of_lengths(0.0, 300, 20)], Meter(Plan())
    assert simulate(load, Knobs(), meter).outcomes == simulate(load).outcomes
    assert meter.num_bytes > 20 * 2 * CARD.shape.multiplied
    assert meter.flops == pytest.approx(319 * CARD.shape.flops(160), rel=0.01)
    narrow = Meter(Plan(weight_bits=8))
    simulate(load, Knobs(), narrow)
    assert narrow.num_bytes == pytest.approx(meter.num_bytes / 2, rel=0.02)
    assert narrow.flops == meter.flops


def test_the_packages_plan_keeps_both_traces_and_the_default_does_not() -> None:
    plain = score_of(Plan())
    for seed in (1, 2):
        good = score_of(package_plan(), seed)
        assert good.kept >= MUST_KEEP > 4 * plain.kept
        assert good.value > 10 * plain.value
        assert good.num_requests == len(trace_of(seed)) == 186


@pytest.mark.parametrize(
    "worse",
    [
        {"weight_bits": 16},
        {"instructions_first": False},
        {"job_priority": 0},
    ],
)
def test_each_rung_pays(worse: dict[str, int]) -> None:
    assert score_of(replace(package_plan(), **worse)).value < score_of(package_plan()).value


def test_memory_limits_the_blocks_and_narrow_weights_leave_room_for_more() -> None:
    assert most_blocks(Plan()) >= Knobs().num_blocks
    assert most_blocks(Plan(weight_bits=8)) > 2 * most_blocks(Plan())
    assert most_blocks(Plan(kv_bits=8)) == pytest.approx(2 * most_blocks(Plan()), abs=1)
    for wrong in (
        *({"num_blocks": 4000}, {"weight_bits": 4}, {"kv_bits": 12}, {"max_num_seqs": 0}),
        *({"max_num_seqs": 10**9}, {"num_blocks": True}, {"job_priority": math.nan}),
    ):
        with pytest.raises(ValueError, match="should"):
            score_of(replace(Plan(), **wrong))
    with pytest.raises(ValueError, match="does not fit into 50 blocks"):
        score_of(Plan(num_blocks=50))


def test_a_score_shows_its_kinds_and_gauges(capsys: pytest.CaptureFixture[str]) -> None:
    found = score_of(Plan())
    found.show()
    shown = capsys.readouterr().out
    assert shown.startswith("13% kept their objectives"), "24 of 186, as the chapter prints"
    assert [every for _, every in found.by_kind.values()] == [150, 12, 24]
    assert "kept, documents" in shown
    assert "running, at most                      16" in shown


def test_a_ladder_has_a_rung_for_each_changed_field(capsys: pytest.CaptureFixture[str]) -> None:
    climb(Plan(max_num_seqs=64, weight_bits=8), "weight_bits")
    _, plain, bits, slots = capsys.readouterr().out.splitlines()
    assert [each.split()[0] for each in (bits, slots)] == ["weight_bits", "max_num_seqs"]
    assert slots.split()[-1] == f"{score_of(Plan(max_num_seqs=64, weight_bits=8)).value:.2f}"
    assert plain.startswith("the plain plan")
    climb(package_plan())
    assert f"{score_of(package_plan()).value:.2f}" in capsys.readouterr().out.splitlines()[-1]
    with pytest.raises(ValueError, match="should name fields"):
        climb(Plan(), "slots")
