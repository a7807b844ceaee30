"""The engine on a simulated clock: its arithmetic, its limits, and agreement with the engine."""

import re
from dataclasses import replace
from typing import Any

import pytest

from minigen.bench.report import Outcome, Slo, report
from minigen.bench.workload import burst, constant
from minigen.trace.events import EventKind
from minigen_course.ch52_slo import lesson
from minigen_course.ch52_slo.diagnosis.cases import CURES
from minigen_course.ch52_slo.lesson import (
    Case,
    Rates,
    Vitals,
    broken_system,
    most_arithmetic,
    num_equal,
    rates_by_length,
    symptoms,
    table,
    traffic_shapes,
)
from minigen_course.lab.cost_model import (
    Card,
    config_of,
    decode_step,
    memory_needed,
    prefill_step,
)
from minigen_course.lab.simulator import Ask, Knobs, Run, asks, simulate

CARD = Card()
FEW = asks(constant(2, 12), prompt=(20, 300), output=(5, 30), seed=4)


def lone(num_prompt: int, num_output: int) -> Ask:
    return Ask(0.0, tuple(range(num_prompt)), num_output)


def test_a_step_takes_the_time_of_chapter_17s_model() -> None:
    (outcome,) = simulate([lone(200, 3)]).outcomes
    shape, machine = CARD.shape, CARD.machine
    assert outcome.gaps == pytest.approx(
        [
            decode_step(shape, 1, context, 16).seconds(machine, CARD.overhead)
            for context in (201, 202)
        ]
    )
    prompt = prefill_step(shape, 200, 16).seconds(machine, CARD.overhead)
    assert outcome.ttft == pytest.approx(prompt, rel=0.03)  # scores for its last token alone


def test_a_long_prompt_takes_the_time_of_its_arithmetic() -> None:
    answer = simulate([lone(2000, 1)]).outcomes[0]
    step = prefill_step(CARD.shape, 2000, 16)
    assert step.flops / CARD.machine.flops > step.num_bytes / CARD.machine.bandwidth
    assert answer.e2e == pytest.approx(step.seconds(CARD.machine, CARD.overhead), rel=0.15)


def test_the_blocks_leave_memory_to_work_in() -> None:
    config = config_of("Llama-3-8B")
    tokens = Knobs().num_blocks * Knobs().block_size
    assert 0.99 * 24e9 < memory_needed(config, 16, 1, tokens).total <= 24e9


def test_a_cache_in_8_bits_has_half_of_the_bytes_to_read() -> None:
    load = [lone(2000, 40)]
    (wide,), (narrow,) = (
        simulate(load, step_cost=card).outcomes for card in (CARD, Card(kv_bits=8))
    )
    spared = wide.gaps[-1] - narrow.gaps[-1]
    cached = 2040 * CARD.shape.kv_numbers(1)  # bytes that are not read
    assert spared == pytest.approx(cached / CARD.machine.bandwidth, rel=0.01)


def test_the_same_load_gives_the_same_run() -> None:
    first, second = simulate(FEW), simulate(FEW)
    assert first.outcomes == second.outcomes
    assert first.events == second.events
    assert [each.output_tokens for each in first.outcomes] == [each.output_tokens for each in FEW]


def test_metrics_agree_with_the_outcomes() -> None:
    run = simulate(FEW)
    read = run.readings
    assert read.counters["generation_tokens"] == sum(each.output_tokens for each in FEW)
    assert read.counters["prompt_tokens"] == sum(len(each.prompt_ids) for each in FEW)
    counts, total = read.histograms["time_to_first_token_seconds"]
    waits = [each.ttft for each in run.outcomes if each.ttft is not None]
    assert sum(counts) == len(FEW)
    assert total == pytest.approx(sum(waits), abs=1e-6)


def test_when_blocks_run_out_a_request_is_recomputed_and_all_finish() -> None:
    load = asks(burst(6), prompt=(60, 60), output=(60, 60))
    run = simulate(load, Knobs(num_blocks=20))
    assert run.readings.counters["num_preemptions"] > 0
    assert [each.output_tokens for each in run.outcomes] == [60] * 6
    vitals = Vitals.of(run)
    assert vitals.preemptions == run.readings.counters["num_preemptions"]
    assert vitals.given_up > 0
    assert vitals.most_kv == 1


def test_shared_prefixes_are_computed_once() -> None:
    load = asks([0.0, 10.0], prompt=(8, 8), output=(4, 4), shared=range(160))
    run = simulate(load)
    counters = run.readings.counters
    hit_rate = counters["prefix_cache_hits"] / counters["prefix_cache_queries"]
    assert Vitals.of(run).hit_rate == hit_rate == 160 / 336
    assert Vitals.of(simulate(load, Knobs(enable_prefix_caching=False))).hit_rate == 0


def test_a_full_queue_refuses_new_requests() -> None:
    load = asks(burst(10), prompt=(20, 20), output=(40, 40))
    run = simulate(load, Knobs(max_num_seqs=2, max_queue=3))
    errors = [each.error for each in run.outcomes]
    assert errors == [None] * 3 + ["HTTP 429"] * 7  # no request runs before the first step
    assert max(each.waiting for each in run.moments) <= 3


def test_a_limit_per_key_does_not_affect_other_keys() -> None:
    load = [
        *asks(burst(5), (20, 20), (9, 9), tenant="a"),
        *asks(burst(3), (20, 20), (9, 9), seed=1, tenant="b"),
    ]
    run = simulate(load, Knobs(max_in_flight_per_key=3))
    assert [each.error is None for each in run.of("a")] == [True] * 3 + [False] * 2
    assert all(each.error is None for each in run.of("b"))


def test_closed_loop_clients_send_less_to_a_stalled_server() -> None:
    def again(ask: Ask, now: float) -> Ask | None:
        return Ask(now, ask.prompt_ids, 5) if now < 20 else None

    closed = simulate([lone(30, 5)], then=again, stall=(5.0, 8.0))
    opened = simulate(asks(constant(2, 40), (30, 30), (5, 5)), stall=(5.0, 8.0))
    assert sum(each.e2e > 1 for each in closed.outcomes) == 1
    assert sum(each.e2e > 1 for each in opened.outcomes) >= 14


def test_chunks_are_the_schedulers_own() -> None:
    run = simulate([lone(1000, 2)], Knobs(max_num_batched_tokens=256))
    chunks = [e.counts["tokens"] for e in run.events if e.kind is EventKind.SCHEDULED]
    assert chunks == [256, 256, 256, 232, 1]


def of_slots(num_slots: int) -> Run:
    return simulate(asks(burst(8), (20, 20), (20, 20)), Knobs(max_num_seqs=num_slots))


def case_of_slots(**further: Any) -> Case:
    few, many = of_slots(1), of_slots(further.pop("after", 8))
    known = {"signs": ("waiting, at most",), "why": "Few slots.", "moved": "No.", **further}
    return Case("late", "batch slots", "L4 batching", "more", few, many, **known)


def test_a_case_is_shown_side_by_side_with_goodput_before_and_after() -> None:
    text = case_of_slots(signs=("TTFT p99",)).text()
    assert "> TTFT p99" in text
    assert "  TTFT p50" in text
    assert "Saturated: batch slots. Layer: L4 batching. Knob: more." in text
    assert re.search(r"Goodput: [\d.]+ to [\d.]+ requests per second; kept both: 12% to 100%", text)


def shown(case: Case, saturated: str | None, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(lesson, "display", lambda data, raw: seen.append(data))
    case.show(7, saturated)
    return seen[0]


def test_a_diagnosis_is_folded_until_an_answer_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of_slots()
    folded = shown(case, None, monkeypatch)["text/html"]
    assert "not tried yet" in folded
    assert "<details><summary>" in folded
    assert "batch slots" not in folded.split("<details>")[0]
    right = shown(case, "batch slots", monkeypatch)["text/html"]
    assert "right" in right
    assert "<details open>" in right
    wrong = shown(case, "blocks", monkeypatch)["text/html"]
    assert "not this time: batch slots" in wrong
    assert "Has the bottleneck moved? No." in wrong
    with pytest.raises(ValueError, match="should be one of"):
        case.show(7, "memory")


def test_the_table_shows_the_change_of_the_first_symptom(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table([case_of_slots()])
    assert "waiting, at most: 7 to 0" in capsys.readouterr().out


def test_the_table_shows_a_second_change_and_who_kept_the_objectives(
    capsys: pytest.CaptureFixture[str],
) -> None:
    more = case_of_slots(after=2, then="even more", further=of_slots(8))
    table([more])
    shown = capsys.readouterr().out
    assert "more; then even more" in shown
    assert "waiting, at most: 7 to 6 to 0" in shown
    assert "| 12% to 25% to 100% |" in shown
    assert "And then: even more." in more.text()


@pytest.mark.parametrize(
    ("number", "answer", "kept"),
    [
        *((1, "batch slots", 0.9), (2, "token budget", 0.6), (3, "blocks", 0.95)),
        *((5, "arithmetic", 0.9), (6, "batch slots", 0.8), (7, "arithmetic", 0.6)),
        (8, "batch slots", 0.9),
    ],
)
def test_the_cure_of_a_broken_system_raises_the_share_that_kept_both(
    number: int, answer: str, kept: float
) -> None:
    system = broken_system(number)
    made = CURES[number](system.load, system.knobs, simulate(system.load, system.knobs))
    before, after, *further = made.vitals
    assert made.answer == answer
    assert after.kept > before.kept
    assert after.kept > kept
    assert all(each.kept > 0.95 for each in further), "the second change cures the rest"
    assert made.why
    assert made.moved


def test_the_cure_of_the_idle_system_raises_its_tokens_per_second() -> None:
    system = broken_system(4)
    made = CURES[4](system.load, system.knobs, simulate(system.load, system.knobs))
    before, after, further = (each.found.output_rate for each in made.vitals)
    assert made.answer == "nothing"
    assert 1.5 * before < after < further


def test_arithmetic_in_use_is_that_of_the_busiest_seconds() -> None:
    load = [lone(2048, 1)]
    run = simulate(load)
    share = 2048 * CARD.shape.flops(0) / CARD.machine.flops / run.seconds
    assert most_arithmetic(run) == pytest.approx(share)
    assert 0.8 < share < 1
    later = Ask(60.0, load[0].prompt_ids, 1)
    both = simulate([*load, later], Knobs(enable_prefix_caching=False))
    assert most_arithmetic(both, seconds=0.2) == pytest.approx(share, rel=0.05)


def test_prompts_begin_alike_as_far_as_all_of_them_do() -> None:
    assert num_equal(asks(burst(3), (4, 9), (1, 1), shared=range(7))) == 7
    assert num_equal(asks(burst(3), (4, 9), (1, 1))) == 0


def test_shapes_of_traffic_differ_in_what_their_names_say() -> None:
    loads = traffic_shapes()
    longest = {name: max(len(ask.prompt_ids) for ask in load) for name, load in loads.items()}
    assert len(loads["many short"]) > 5 * len(loads["few long"])
    assert longest["many short"] < 200 < 2000 < longest["few long"]
    assert num_equal(loads["one system prompt"]) == 1500
    assert all(0 <= ask.at <= 20 for load in loads.values() for ask in load)


def test_vitals_count_who_kept_which_objective() -> None:
    run = of_slots(4)  # four wait for the first four
    vitals = Vitals.of(run, (Slo("ttft", 0.5), Slo("itl", 0.1)))
    assert (vitals.kept_ttft, vitals.kept_itl, vitals.kept) == (0.5, 1, 0.5)
    refusing = simulate(asks(burst(4), (20, 20), (9, 9)), Knobs(max_num_seqs=1, max_queue=1))
    assert Vitals.of(refusing).kept == 0.25, "a refused request keeps nothing"


def ended(arrived: float, first: float, at: float, error: str | None = None) -> Outcome:
    return Outcome(arrived, arrived, at, (first, at), 2, error=error)


def test_rates_are_of_the_requests_that_end_in_the_window() -> None:
    outcomes = [
        *(ended(0, 0.2, 9.9), ended(9, 9.2, 10.0), ended(8, 12.0, 14.0)),
        *(ended(13, 13.1, 14.9, "HTTP 429"), ended(14, 14.1, 15.0)),
    ]
    found = Rates.of(outcomes, (Slo("ttft", 0.5),), (10, 15))
    assert found == Rates(answered=2 / 5, good=1 / 5, good_tokens=2 / 5)


def test_rates_by_length_are_those_of_the_reports_of_the_first_requests() -> None:
    outcomes = of_slots(2).outcomes
    slos = (Slo("ttft", 0.5),)
    answered, good = rates_by_length(outcomes, slos)
    for count in (1, 3, 8):
        whole = report(outcomes[:count], slos)
        assert answered[count - 1] == pytest.approx(whole.request_rate)
        assert good[count - 1] == pytest.approx(whole.goodput)


def test_beyond_saturation_a_longer_load_has_no_more_good_answers() -> None:
    few, slos = Knobs(max_num_seqs=2), (Slo("ttft", 0.5),)
    num_good = []
    for count in (20, 40, 80):
        outcomes = simulate(asks(constant(8, count), (20, 20), (20, 20)), few).outcomes
        num_good.append(sum(slos[0].is_met(each) for each in outcomes))
    assert 0 < num_good[0] == num_good[1] == num_good[2]


def test_the_full_system_has_all_blocks_of_its_card_and_its_first_tokens_wait_for_them() -> None:
    system = broken_system(3)
    assert system.knobs.num_blocks == Knobs().num_blocks
    broken = Vitals.of(simulate(system.load, system.knobs))
    assert broken.preemptions > 0
    assert broken.most_waiting > 0
    assert broken.most_running < system.knobs.max_num_seqs, "batch slots are free"


def test_requests_can_wait_for_blocks_without_any_preemption() -> None:
    load = asks(constant(7, 40), (470, 470), (10, 10))  # 30 blocks each, from first step to last
    tight, roomy = (Vitals.of(simulate(load, Knobs(num_blocks=each))) for each in (100, 250))
    assert tight.preemptions == roomy.preemptions == 0
    assert tight.most_running == 3
    assert tight.most_waiting > 5 > roomy.most_waiting
    assert tight.kept_ttft < 0.5 < roomy.kept_ttft == 1


def test_chats_and_documents_are_counted_apart() -> None:
    system = broken_system(2)
    made = CURES[2](system.load, system.knobs, simulate(system.load, system.knobs))
    assert {each.found.num_requests for each in made.vitals} == {90}, "the same chats in each run"
    assert "Of the 16 documents, 0, 0 and 0 keep 500 ms" in made.moved


def test_with_more_slots_chats_stutter_behind_the_job_and_smaller_steps_help() -> None:
    system = broken_system(6)
    made = CURES[6](system.load, system.knobs, simulate(system.load, system.knobs))
    assert made.further is not None
    assert "5 of 110 chats stutter" in made.moved
    small = simulate(
        made.further.asks, replace(system.knobs, max_num_seqs=64, max_num_batched_tokens=512)
    )
    assert Vitals.of(small, tenant="chat").kept == 1


def test_broken_systems_differ_and_show_nothing_of_their_fault(
    capsys: pytest.CaptureFixture[str],
) -> None:
    systems = [broken_system(number) for number in range(1, 9)]
    assert len({each.load for each in systems}) == 8
    (run,) = symptoms(4)
    assert run.outcomes == simulate(systems[3].load, systems[3].knobs).outcomes
    shown = capsys.readouterr().out
    assert "system 4" in shown
    assert "static" not in shown
    with pytest.raises(ValueError, match="no 9"):
        broken_system(9)


def test_vitals_can_be_those_of_one_tenant() -> None:
    load = [
        *asks(burst(4), (20, 20), (9, 9), tenant="a"),
        *asks([5.0], (20, 20), (9, 9), seed=1, tenant="b"),
    ]
    run = simulate(load, Knobs(max_num_seqs=1))
    slos = (Slo("ttft", 0.5),)
    assert Vitals.of(run, slos, "b").found == report(run.of("b"), slos)
    assert Vitals.of(run, slos).found.num_requests == 5
