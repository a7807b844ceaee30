"""The engine on a simulated clock: its arithmetic, its limits, and agreement with the engine."""

import pytest

from minigen.bench.report import Slo, report
from minigen.bench.workload import burst, constant
from minigen.trace.events import EventKind
from minigen_course.ch52_slo.lesson import Case, Vitals, broken_system, symptoms, table
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
    assert Vitals.of(simulate(load)).hit_rate == 160 / 336
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


def of_seats(num_seats: int) -> Run:
    return simulate(asks(burst(8), (20, 20), (20, 20)), Knobs(max_num_seqs=num_seats))


def test_a_case_is_shown_side_by_side_and_as_relieved_only_if_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = Case("late", "seats", "more", of_seats(1), of_seats(8), ("TTFT p99",))
    assert case.tell(lambda before, after: after.most_waiting < before.most_waiting) is case
    output = capsys.readouterr().out
    assert "> TTFT p99" in output
    assert "  TTFT p50" in output
    with pytest.raises(AssertionError, match="does not relieve"):
        case.tell(lambda before, after: False)


def test_the_table_shows_the_change_of_the_first_symptom(
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = Case("late", "seats", "more", of_seats(1), of_seats(8), ("waiting, at most",))
    table([case])
    assert "waiting, at most: 7 to 0" in capsys.readouterr().out


def test_the_table_shows_a_second_change_and_who_kept_the_objectives(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = [of_seats(number) for number in (1, 2, 8)]
    case = Case("late", "seats", "more", runs[0], runs[1], ("waiting, at most",))
    more = Case(**{**vars(case), "then": "even more", "further": runs[2]})
    table([more])
    shown = capsys.readouterr().out
    assert "more; then even more" in shown
    assert "waiting, at most: 7 to 6 to 0" in shown
    assert "| 12% to 25% to 100% |" in shown
    more.tell(lambda before, after: True)
    assert "and then: even more" in capsys.readouterr().out


def test_vitals_count_who_kept_which_objective() -> None:
    run = of_seats(4)  # four wait for the first four
    vitals = Vitals.of(run, (Slo("ttft", 0.5), Slo("itl", 0.1)))
    assert (vitals.kept_ttft, vitals.kept_itl, vitals.kept) == (0.5, 1, 0.5)
    refusing = simulate(asks(burst(4), (20, 20), (9, 9)), Knobs(max_num_seqs=1, max_queue=1))
    assert Vitals.of(refusing).kept == 0.25, "a refused request keeps nothing"


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
