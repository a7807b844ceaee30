"""What is built from the engine's events: summaries, totals of work, and a picture over time.

Hand-written events have answers known in advance. Recordings of a real engine must agree with its
outputs, with its memory, and among themselves. No sequence of events may break these tools.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minigen import LLM, SamplingParams
from minigen.model.attention import causal_mask
from minigen.outputs import RequestOutput
from minigen.trace.chrome import chrome_trace, write_chrome_trace
from minigen.trace.counters import WorkCounters
from minigen.trace.events import Event, EventKind, Recorder, Subscriber, Trace
from minigen.trace.summary import RequestSummary, percentile, summarize, table
from minigen.trace.timeline import Request, Timeline

COUNTS: dict[EventKind, set[str]] = {
    EventKind.QUEUED: {"prompt_tokens", "waited_ns"},
    EventKind.SCHEDULED: {"tokens", "computed"},
    EventKind.PREFIX_HIT: {"tokens", "blocks"},
    EventKind.VERIFIED: {"drafted", "accepted"},
    EventKind.BLOCK_ALLOCATED: {"block"},
    EventKind.BLOCK_SHARED: {"block"},
    EventKind.BLOCK_COPIED: {"source", "block"},
    EventKind.BLOCK_CACHED: {"block"},
    EventKind.BLOCK_DEDUPLICATED: {"source", "block"},
    EventKind.BLOCK_FREED: {"block"},
    EventKind.BLOCK_EVICTED: {"block"},
    EventKind.FORKED: {"parent", "blocks"},
    EventKind.PREEMPTED: {"computed"},
    EventKind.NEW_TOKEN: {"token"},
    EventKind.FINISHED: {"output_tokens", "stopped"},
    EventKind.ABORTED: {"output_tokens"},
    EventKind.FAILED: {"output_tokens"},
    EventKind.STEP: {"sequences", "tokens", "duration_ns"},
    EventKind.ALL_REDUCED: {"bytes", "duration_ns"},
    EventKind.ALL_GATHERED: {"bytes", "duration_ns"},
    EventKind.BROADCAST: {"bytes", "duration_ns"},
    EventKind.SHIFTED: {"bytes", "duration_ns"},
    EventKind.SENT: {"bytes", "duration_ns"},
    EventKind.RECEIVED: {"bytes", "duration_ns"},
    EventKind.MICRO_BATCH: {
        *("stage", "micro_batch", "sequences", "tokens"),
        *("started_ns", "duration_ns"),
    },
}


def at(milliseconds: float, kind: EventKind, sequence_id: int | None, **counts: int) -> Event:
    """Return an event of a hand-written story, which starts at an odd time of the clock."""
    assert counts.keys() == COUNTS[kind]
    return Event(kind, 7_000_000_123 + round(milliseconds * 1e6), sequence_id, counts)


def step(milliseconds: float, duration: float, tokens: int) -> Event:
    nanoseconds = round(duration * 1e6)
    counts = {"sequences": 1, "tokens": tokens, "duration_ns": nanoseconds}
    return at(milliseconds, EventKind.STEP, None, **counts)


# A prompt of 6 tokens, 4 of them cached, a first token at 8 ms and two more.
ONE_REQUEST = [
    at(0, EventKind.QUEUED, 3, prompt_tokens=6, waited_ns=0),
    at(5, EventKind.PREFIX_HIT, 3, tokens=4, blocks=1),
    at(5, EventKind.BLOCK_SHARED, 3, block=9),
    at(5, EventKind.BLOCK_ALLOCATED, 3, block=2),
    at(5, EventKind.SCHEDULED, 3, tokens=2, computed=4),
    at(8, EventKind.NEW_TOKEN, 3, token=77),
    step(9, duration=4, tokens=2),
    at(10, EventKind.SCHEDULED, 3, tokens=1, computed=6),
    at(12, EventKind.NEW_TOKEN, 3, token=78),
    step(12, duration=3, tokens=1),
    at(13, EventKind.SCHEDULED, 3, tokens=1, computed=7),
    at(18, EventKind.BLOCK_FREED, 3, block=2),
    at(18, EventKind.NEW_TOKEN, 3, token=2),
    at(18, EventKind.FINISHED, 3, output_tokens=3, stopped=1),
    step(18, duration=6, tokens=1),
]

# Request 1 prefills for itself and its sibling 2; later 2 is preempted at 5 tokens and recomputed.
FORK_AND_PREEMPTION = [
    at(0, EventKind.QUEUED, 1, prompt_tokens=4, waited_ns=0),
    at(1, EventKind.QUEUED, 2, prompt_tokens=4, waited_ns=0),
    at(2, EventKind.SCHEDULED, 1, tokens=4, computed=0),
    at(6, EventKind.FORKED, 2, parent=1, blocks=1),
    at(7, EventKind.NEW_TOKEN, 1, token=5),
    at(7, EventKind.NEW_TOKEN, 2, token=6),
    step(7, duration=5, tokens=4),
    at(8, EventKind.SCHEDULED, 1, tokens=1, computed=4),
    at(8, EventKind.SCHEDULED, 2, tokens=1, computed=4),
    at(9, EventKind.NEW_TOKEN, 1, token=5),
    at(9, EventKind.NEW_TOKEN, 2, token=6),
    step(9, duration=1, tokens=2),
    at(10, EventKind.PREEMPTED, 2, computed=5),
    at(11, EventKind.ABORTED, 1, output_tokens=2),
    at(12, EventKind.PREFIX_HIT, 2, tokens=2, blocks=1),
    at(12, EventKind.SCHEDULED, 2, tokens=4, computed=2),
    at(14, EventKind.NEW_TOKEN, 2, token=6),
    step(14, duration=2, tokens=4),
]


def counted(events: Iterable[Event], windows: tuple[int | None, ...] = (None,)) -> WorkCounters:
    return Timeline(WorkCounters(kv_bytes=1, windows=windows)).replay(events).work


def records(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [record for record in trace["traceEvents"] if record["ph"] == phase]


def track_names(trace: dict[str, Any]) -> dict[int, str]:
    named = [each for each in records(trace, "M") if each["name"] == "thread_name"]
    return {each["tid"]: each["args"]["name"] for each in named}


def slices(trace: dict[str, Any], track: str) -> list[tuple[str, float, float]]:
    """Return a track's slices: name, begin and end in milliseconds."""
    names = track_names(trace)
    return [
        (each["name"], each["ts"] / 1000, (each["ts"] + each["dur"]) / 1000)
        for each in records(trace, "X")
        if names[each["tid"]] == track
    ]


def level(trace: dict[str, Any], name: str) -> list[int]:
    return [each["args"][name] for each in records(trace, "C") if each["name"] == name]


def assert_drawable(trace: dict[str, Any]) -> None:
    """Check that no slice is before the start, out of order, or over another slice of its track."""
    times = [record["ts"] for record in trace["traceEvents"]]
    assert times == sorted(times)
    assert all(time >= 0 for time in times)
    by_track = defaultdict(list)
    for each in records(trace, "X"):
        assert each["dur"] >= 0
        by_track[each["tid"]].append((each["ts"], each["ts"] + each["dur"]))
    for spans in by_track.values():
        assert all(ended <= started for (_, ended), (started, _) in pairwise(sorted(spans)))
    assert by_track.keys() <= track_names(trace).keys()


def test_a_summary_shows_when_and_how_a_request_was_answered() -> None:
    (summary,) = summarize(ONE_REQUEST)
    assert summary == RequestSummary(
        sequence_id=3,
        parent=None,
        finish="finished",
        prompt_tokens=6,
        output_tokens=3,
        queued_ms=5.0,
        prefill_ms=3.0,
        ttft_ms=8.0,
        decode_ms=10.0,
        inter_token_ms=(4.0, 6.0),
        num_steps=3,
        prefix_hit_tokens=4,
        recomputed_tokens=0,
        preemptions=0,
        blocks_allocated=1,
        blocks_shared=1,
        blocks_copied=0,
    )


def test_a_forked_requests_prefill_is_its_parents() -> None:
    parent, child = summarize(FORK_AND_PREEMPTION)
    assert (parent.parent, child.parent) == (None, 1)
    assert (parent.queued_ms, parent.prefill_ms, parent.ttft_ms) == (2.0, 5.0, 7.0)
    assert (child.queued_ms, child.prefill_ms, child.ttft_ms) == (1.0, 5.0, 6.0)


def test_a_preempted_request_recomputes_what_the_prefix_cache_does_not_hold() -> None:
    aborted, preempted = summarize(FORK_AND_PREEMPTION)
    assert (aborted.finish, aborted.output_tokens, aborted.preemptions) == ("aborted", 2, 0)
    assert (preempted.finish, preempted.output_tokens, preempted.preemptions) == (None, 3, 1)
    assert (preempted.prefix_hit_tokens, preempted.recomputed_tokens) == (2, 3)
    assert preempted.inter_token_ms == (2.0, 5.0)


def test_a_request_that_never_ran_has_no_times() -> None:
    (summary,) = summarize(
        [
            at(0, EventKind.QUEUED, 1, prompt_tokens=6, waited_ns=0),
            at(5, EventKind.ABORTED, 1, output_tokens=0),
        ]
    )
    times = (summary.queued_ms, summary.prefill_ms, summary.ttft_ms, summary.decode_ms)
    assert times == (None, None, None, None)
    assert (summary.num_steps, summary.output_tokens, summary.finish) == (0, 0, "aborted")


def test_a_summary_of_a_partial_recording_has_only_the_known_times() -> None:
    (summary,) = summarize(ONE_REQUEST[6:])
    assert (summary.finish, summary.output_tokens) == ("finished", 3)
    assert summary.inter_token_ms == (6.0,)
    unknown = set(vars(summary)) - {"sequence_id", "finish", "output_tokens", "inter_token_ms"}
    assert {name for name in unknown if getattr(summary, name) is not None} == set()


def test_a_parent_that_ran_before_its_child_was_queued_caused_no_waiting() -> None:
    events = [
        at(1, EventKind.SCHEDULED, 1, tokens=4, computed=0),
        at(3, EventKind.QUEUED, 2, prompt_tokens=4, waited_ns=0),
        at(5, EventKind.FORKED, 2, parent=1, blocks=1),
        at(6, EventKind.NEW_TOKEN, 2, token=6),
        step(6, duration=6, tokens=4),
    ]
    child = summarize(events)[1]
    assert (child.queued_ms, child.prefill_ms, child.ttft_ms) == (0.0, 3.0, 3.0)
    assert slices(chrome_trace(events), "request 2") == [
        ("queued", 2, 2),
        ("prefill by request 1", 2, 5),
    ]


# What the parent computed and the child loses is recomputed: 4 tokens at once, then 3 and 5.
LOST_TWICE = [
    at(0, EventKind.QUEUED, 1, prompt_tokens=4, waited_ns=0),
    at(0, EventKind.QUEUED, 2, prompt_tokens=4, waited_ns=0),
    at(1, EventKind.SCHEDULED, 1, tokens=4, computed=0),
    at(2, EventKind.FORKED, 2, parent=1, blocks=1),
    step(3, duration=2, tokens=4),
    at(4, EventKind.PREEMPTED, 2, computed=4),
    at(5, EventKind.SCHEDULED, 2, tokens=5, computed=0),
    step(6, duration=1, tokens=5),
    at(7, EventKind.PREEMPTED, 2, computed=5),
    at(8, EventKind.SCHEDULED, 2, tokens=3, computed=0),
    step(9, duration=1, tokens=3),
    at(10, EventKind.PREEMPTED, 2, computed=3),
    at(11, EventKind.SCHEDULED, 2, tokens=6, computed=0),
    step(12, duration=1, tokens=6),
]


def test_tokens_lost_repeatedly_are_recomputed_as_often() -> None:
    parent, child = summarize(LOST_TWICE)
    assert (parent.recomputed_tokens, child.recomputed_tokens) == (0, 4 + 3 + 5)
    counters = counted(LOST_TWICE)
    assert counters.tokens_recomputed == 4 + 3 + 5
    assert (counters.tokens_prefilled, counters.tokens_decoded) == (4, 2)
    names = [name for name, _, _ in slices(chrome_trace(LOST_TWICE), "request 2")]
    assert names[2:] == ["preempted", "recompute"] * 3


def test_an_id_that_is_queued_again_is_another_request() -> None:
    events = [
        at(0, EventKind.QUEUED, 3, prompt_tokens=6, waited_ns=0),
        at(2, EventKind.SCHEDULED, 3, tokens=6, computed=0),
        at(4, EventKind.QUEUED, 3, prompt_tokens=6, waited_ns=0),
        at(5, EventKind.SCHEDULED, 3, tokens=6, computed=0),
        step(7, duration=2, tokens=6),
    ]
    first, second = summarize(events)
    assert (first.num_steps, second.num_steps) == (1, 1)
    assert second.recomputed_tokens == 0
    assert list(track_names(chrome_trace(events)).values()) == ["engine"] + ["request 3"] * 2
    assert slices(chrome_trace(events), "request 3") == [
        *(("queued", 0, 2), ("prefill", 2, 4)),
        *(("queued", 4, 5), ("prefill", 5, 7)),
    ]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 1))
def test_percentiles_are_numpys(values: list[float], share: float) -> None:
    expected = float(np.percentile(values, share * 100))
    assert percentile(values, share) == pytest.approx(expected, abs=1e-6)


def test_percentiles_of_nothing_and_beyond_the_ends_are_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        percentile([], 0.5)
    with pytest.raises(ValueError, match="from 0 to 1, not 95"):
        percentile([1.0], 95)


def test_the_table_has_a_line_for_each_request_and_the_latencies_below() -> None:
    lines = table(summarize(ONE_REQUEST + FORK_AND_PREEMPTION)).splitlines()
    assert len({len(line) for line in lines[:4]}) == 1, "columns are aligned"
    assert lines[0].split()[:4] == ["request", "prompt", "cached", "output"]
    assert lines[1].split() == "3 6 4 3 finished 0 5.0 3.0 8.0 10.0".split()
    assert lines[3].split() == "2 4 2 3 - 1 1.0 5.0 6.0 7.0".split()
    assert lines[-2] == "time to first token p50 7.0 ms, p95 7.9 ms"
    assert lines[-1] == "inter-token latency p50 4.0 ms, p95 5.8 ms"
    assert table([]).splitlines()[-1] == "inter-token latency none"


def test_every_computed_token_is_prefilled_decoded_or_computed_again() -> None:
    counters = counted(FORK_AND_PREEMPTION)
    assert counters.tokens_prefilled == 4
    assert counters.tokens_shared == 4
    assert counters.tokens_cached == 2
    assert counters.tokens_recomputed == 3  # positions 2, 3 and 4
    assert counters.tokens_decoded == 3  # two of position 4, and then position 5
    assert (counters.steps, counters.preemptions) == (3, 1)


def test_a_prompt_in_chunks_is_prefilled_to_its_last_token_even_alone() -> None:
    counters = counted(
        [
            at(0, EventKind.QUEUED, 1, prompt_tokens=5, waited_ns=0),
            at(1, EventKind.SCHEDULED, 1, tokens=4, computed=0),
            at(2, EventKind.SCHEDULED, 1, tokens=1, computed=4),
            at(3, EventKind.SCHEDULED, 1, tokens=1, computed=5),
        ]
    )
    assert (counters.tokens_prefilled, counters.tokens_decoded) == (5, 1)


def test_single_tokens_of_a_sequence_queued_before_the_recording_count_as_decoded() -> None:
    counters = counted(
        [
            at(1, EventKind.SCHEDULED, 1, tokens=4, computed=8),
            at(2, EventKind.SCHEDULED, 1, tokens=1, computed=12),
            at(3, EventKind.PREEMPTED, 2, computed=7),
            at(4, EventKind.SCHEDULED, 2, tokens=8, computed=0),
        ]
    )
    assert (counters.tokens_prefilled, counters.tokens_decoded) == (4 + 1, 1)
    assert counters.tokens_recomputed == 7


@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
@pytest.mark.parametrize(("computed", "tokens"), [(0, 1), (0, 9), (20, 1), (20, 5), (2, 2)])
def test_bytes_read_are_those_that_the_causal_mask_shows(
    window: int | None, computed: int, tokens: int
) -> None:
    counters = WorkCounters(kv_bytes=10, windows=[None, window, window])
    Timeline(counters)(at(0, EventKind.SCHEDULED, 1, tokens=tokens, computed=computed))
    context = computed + tokens
    seen = int(causal_mask(tokens, context, window).any(dim=0).sum())
    assert counters.kv_bytes_read == 10 * (context + 2 * seen)


def test_a_timeline_keeps_nothing_about_ended_requests() -> None:
    timeline = Timeline().replay(ONE_REQUEST)
    counters, empty = timeline.work, counted([])
    assert not timeline.requests
    assert not timeline.strangers
    assert not timeline.running
    assert not timeline.rows
    assert empty.as_dict().keys() == counters.as_dict().keys()
    assert set(empty.as_dict().values()) == {0}
    assert counters.as_dict()["tokens_cached"] == 4


def test_a_request_is_drawn_as_it_waits_prefills_and_decodes() -> None:
    trace = chrome_trace(ONE_REQUEST)
    assert_drawable(trace)
    assert slices(trace, "request 3") == [
        ("queued", 0, 5),
        ("prefill", 5, 9),
        ("decode", 10, 12),
        ("decode", 13, 18),
    ]
    assert slices(trace, "engine") == [("step", 5, 9), ("step", 9, 12), ("step", 12, 18)]
    instants = [(each["name"], each["ts"]) for each in records(trace, "i")]
    tokens = [("token", 8000), ("token", 12000), ("token", 18000)]
    assert instants == [("prefix hit", 5000), *tokens, ("finished", 18000)]
    (prefill,) = (each for each in records(trace, "X") if each["name"] == "prefill")
    assert prefill["args"] == {"tokens": 2, "computed": 4}
    assert level(trace, "blocks in use") == [0, 1, 2, 1]
    assert level(trace, "running") == [0, 1, 0]
    assert level(trace, "tokens in batch") == [2, 0, 1, 0, 1, 0]


def test_no_events_make_an_empty_picture_and_no_summaries() -> None:
    trace = chrome_trace([])
    assert {record["ph"] for record in trace["traceEvents"]} == {"M"}
    assert summarize([]) == []


def test_a_step_is_drawn_from_its_first_chunk_on_if_its_event_came_late() -> None:
    """As when the process had to wait between the end of the measurement and the event."""
    story = [
        at(0, EventKind.QUEUED, 3, prompt_tokens=2, waited_ns=0),
        at(1, EventKind.SCHEDULED, 3, tokens=2, computed=0),
        step(9, 3, 2),
    ]
    trace = chrome_trace(story)
    assert slices(trace, "engine") == [("step", 1, 9)]
    assert slices(trace, "request 3") == [("queued", 0, 1), ("prefill", 1, 9)]


def test_a_fork_and_a_preemption_are_drawn() -> None:
    trace = chrome_trace(FORK_AND_PREEMPTION)
    assert_drawable(trace)
    assert slices(trace, "request 2") == [
        ("queued", 1, 2),
        ("prefill by request 1", 2, 7),
        ("decode", 8, 9),
        ("preempted", 10, 12),
        ("recompute", 12, 14),
    ]
    assert slices(trace, "request 1")[-1] == ("decode", 8, 9)
    assert level(trace, "running") == [0, 1, 2, 1, 0, 1]


def test_a_chunk_whose_step_failed_ends_with_its_request() -> None:
    trace = chrome_trace(
        [
            at(0, EventKind.SCHEDULED, 1, tokens=3, computed=0),
            at(4, EventKind.ABORTED, 1, output_tokens=0),
            at(8, EventKind.SCHEDULED, 2, tokens=3, computed=0),
            step(9, duration=2, tokens=3),
        ]
    )
    assert slices(trace, "request 1") == [("prefill", 0, 4)]
    assert slices(trace, "request 2") == [("prefill", 8, 9)]


def test_slices_beyond_the_recording_are_drawn_from_its_start_or_to_its_end() -> None:
    trace = chrome_trace(
        [
            step(0, duration=50, tokens=1),
            at(2, EventKind.QUEUED, 1, prompt_tokens=2, waited_ns=0),
            at(3, EventKind.SCHEDULED, 1, tokens=2, computed=0),
            step(5, duration=99, tokens=2),
            at(6, EventKind.PREEMPTED, 1, computed=2),
            at(6, EventKind.PREEMPTED, 2, computed=7),
            at(7, EventKind.SCHEDULED, 2, tokens=8, computed=0),
            step(8, duration=99, tokens=8),
            at(9, EventKind.BLOCK_EVICTED, None, block=4),
        ]
    )
    assert_drawable(trace)
    assert slices(trace, "engine") == [("step", 0, 0), ("step", 0, 5), ("step", 5, 8)]
    assert slices(trace, "request 1")[-1] == ("preempted", 6, 9)
    assert slices(trace, "request 2") == [("preempted", 6, 7), ("recompute", 7, 8)]
    assert level(trace, "blocks in use") == [0]


@dataclass
class Run:
    """A recording of an engine that answered, and then aborted an answer.

    `blocks_in_use` are those that its allocator counted at the end of each step.
    """

    llm: LLM
    recorder: Recorder
    timeline: Timeline
    outputs: list[RequestOutput]
    blocks_in_use: list[int]

    @property
    def events(self) -> list[Event]:
        return self.recorder.events

    @property
    def counters(self) -> WorkCounters:
        return self.timeline.work

    def count(self, kind: EventKind) -> int:
        return Counter(event.kind for event in self.events)[kind]


SHARED = "a beginning that all prompts have, "
TIGHT = {"num_blocks": 40, "block_size": 4, "max_num_seqs": 8}
ENGINES: dict[str, dict[str, Any]] = {
    "roomy": {"max_num_seqs": 8, "block_size": 4},
    "static": {"max_num_seqs": 3, "scheduler": "static"},
    "in chunks": {"max_num_seqs": 6, "max_num_batched_tokens": 10, "enable_prefix_caching": False},
    "preempted": TIGHT,
    "preempted without a prefix cache": {**TIGHT, "enable_prefix_caching": False},
}


@pytest.fixture(scope="module", params=ENGINES)
def run(request: pytest.FixtureRequest, tiny_directory: Path) -> Run:
    llm = LLM.load(tiny_directory, weights="float32", **ENGINES[request.param])
    timeline = Timeline(WorkCounters(kv_bytes=64, windows=llm.config.sliding_windows))
    llm.trace.subscribe(timeline)
    allocator = llm.engine.scheduler.manager.allocator  # type: ignore[attr-defined]
    blocks_in_use: list[int] = []

    def look(event: Event) -> None:
        if event.kind is EventKind.STEP:
            blocks_in_use.append(allocator.num_blocks - allocator.num_free)

    llm.trace.subscribe(look)
    params = SamplingParams(seed=3, max_tokens=18, ignore_eos=True)
    forked = SamplingParams(seed=4, n=3, max_tokens=9, ignore_eos=True)
    with llm.record() as recorder:
        outputs = llm.generate([SHARED + letter * 3 for letter in "abcdefgh"], params)
        outputs += llm.generate([SHARED + "forks", "others"], forked)
        given_up = llm.stream_deltas(["given up"], params)
        next(given_up)
        given_up.close()
    return Run(llm, recorder, timeline, outputs, blocks_in_use)


def test_the_recording_contains_the_expected_events(
    run: Run, request: pytest.FixtureRequest
) -> None:
    engine = request.node.callspec.params["run"]
    assert (run.count(EventKind.PREEMPTED) > 0) == engine.startswith("preempted")
    assert (run.count(EventKind.PREFIX_HIT) > 0) == (engine in ("roomy", "static", "preempted"))
    assert run.count(EventKind.FORKED) == (0 if engine == "static" else 4)
    assert run.count(EventKind.ABORTED) == 1


def test_every_event_carries_the_counts_of_its_kind(run: Run) -> None:
    assert all(event.counts.keys() == COUNTS[event.kind] for event in run.events)
    times = [event.time_ns for event in run.events]
    assert times == sorted(times)


def test_summaries_agree_with_the_answers(run: Run) -> None:
    *answered, given_up = summarize(run.events)
    expected = [
        (output.num_prompt_tokens, len(choice.token_ids), "finished")
        for output in run.outputs
        for choice in output.choices
    ]
    found = [(each.prompt_tokens, each.output_tokens, each.finish) for each in answered]
    assert found == expected
    assert (given_up.output_tokens, given_up.finish) == (1, "aborted")


def test_the_times_of_a_summary_add_up(run: Run) -> None:
    for each in summarize(run.events):
        assert each.queued_ms is not None
        assert each.prefill_ms is not None
        assert min(each.queued_ms, each.prefill_ms) > 0
        assert each.ttft_ms == pytest.approx(each.queued_ms + each.prefill_ms)
        assert each.decode_ms == pytest.approx(sum(each.inter_token_ms))
        assert len(each.inter_token_ms) + 1 == each.output_tokens


def test_summaries_and_counters_agree(run: Run) -> None:
    for field, total in {
        "prefix_hit_tokens": run.counters.tokens_cached,
        "recomputed_tokens": run.counters.tokens_recomputed,
        "preemptions": run.counters.preemptions,
        "blocks_allocated": run.counters.blocks_allocated,
        "blocks_shared": run.counters.blocks_shared,
        "blocks_copied": run.counters.blocks_copied,
    }.items():
        assert sum(getattr(each, field) for each in summarize(run.events)) == total


def test_every_token_of_a_step_is_counted_once(run: Run) -> None:
    counters = run.counters
    computed = counters.tokens_prefilled + counters.tokens_decoded + counters.tokens_recomputed
    steps = [event for event in run.events if event.kind is EventKind.STEP]
    assert computed == sum(event.counts["tokens"] for event in steps)
    assert counters.steps == len(steps)
    assert not run.timeline.requests
    assert not run.timeline.strangers


@pytest.mark.parametrize("run", ["roomy", "static", "in chunks"], indirect=True)
def test_unless_preempted_every_prompt_token_is_prefilled_cached_or_shared(run: Run) -> None:
    counters = run.counters
    known = counters.tokens_prefilled + counters.tokens_cached + counters.tokens_shared
    assert known == sum(each.prompt_tokens or 0 for each in summarize(run.events))
    outputs = [each.output_tokens or 0 for each in summarize(run.events)]
    assert counters.tokens_decoded == sum(outputs) - len(outputs), "last ones are not computed"


def test_tokens_are_computed_again_only_when_preempted(run: Run) -> None:
    assert (run.counters.tokens_recomputed > 0) == (run.count(EventKind.PREEMPTED) > 0)
    for each in summarize(run.events):
        if each.preemptions == 0:
            assert each.recomputed_tokens == 0


@pytest.mark.parametrize("run", ["preempted without a prefix cache"], indirect=True)
def test_without_a_prefix_cache_all_that_preemption_loses_is_computed_again(run: Run) -> None:
    lost = [each.counts["computed"] for each in run.events if each.kind is EventKind.PREEMPTED]
    assert run.counters.tokens_recomputed == sum(lost)


def test_the_picture_is_valid_and_complete(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_chrome_trace(run.events, path)
    trace = json.loads(path.read_text(encoding="utf-8"))
    assert trace == chrome_trace(run.events)
    assert_drawable(trace)
    tokens = [each for each in records(trace, "i") if each["name"] == "token"]
    assert len(tokens) == run.count(EventKind.NEW_TOKEN)
    assert len(slices(trace, "engine")) == run.count(EventKind.STEP)
    for each in summarize(run.events):
        names = Counter(name for name, _, _ in slices(trace, f"request {each.sequence_id}"))
        chunks = names["prefill"] + names["decode"] + names["recompute"]
        assert chunks == each.num_steps
        assert names["preempted"] == each.preemptions
        assert names["queued"] == 1


def test_slices_lie_within_their_steps(run: Run) -> None:
    trace = chrome_trace(run.events)
    steps = [(started, ended) for _, started, ended in slices(trace, "engine")]
    for each in summarize(run.events):
        for name, started, ended in slices(trace, f"request {each.sequence_id}"):
            if name in ("prefill", "decode", "recompute"):
                assert any(a <= started and ended == b for a, b in steps)


def test_blocks_in_use_at_the_end_are_those_of_the_prefix_cache(run: Run) -> None:
    trace = chrome_trace(run.events)
    manager = run.llm.engine.scheduler.manager  # type: ignore[attr-defined]
    kept = 0 if manager.prefix_cache is None else manager.prefix_cache.num_blocks
    allocator = manager.allocator
    assert level(trace, "blocks in use")[-1] == kept
    assert kept == allocator.num_blocks - allocator.num_free
    assert max(level(trace, "blocks in use")) <= allocator.num_blocks
    assert level(trace, "running")[-1] == 0
    assert level(trace, "tokens in batch")[-1] == 0


def test_blocks_in_use_are_those_of_the_allocator_after_every_step(run: Run) -> None:
    ends = [i for i, event in enumerate(run.events) if event.kind is EventKind.STEP]
    assert len(ends) == len(run.blocks_in_use)
    for end, in_use in list(zip(ends, run.blocks_in_use, strict=True))[::5]:
        assert level(chrome_trace(run.events[: end + 1]), "blocks in use")[-1] == in_use


def test_a_recording_may_start_anywhere(run: Run) -> None:
    whole = {each.sequence_id: each for each in summarize(run.events)}
    for first in range(0, len(run.events), 37):
        events = run.events[first:]
        assert_drawable(chrome_trace(events))
        counted(events)
        for each in summarize(events):
            if each.prompt_tokens is None:
                gaps = whole[each.sequence_id].inter_token_ms
                assert gaps[len(gaps) - len(each.inter_token_ms) :] == each.inter_token_ms
            else:
                assert each == whole[each.sequence_id]


def test_an_unsubscribed_listener_is_distinguished_from_equal_ones() -> None:
    trace = Trace()
    pairs: list[tuple[Subscriber, Subscriber]] = [
        (Recorder(), Recorder()),
        (Timeline(), Timeline()),
    ]
    for first, second in pairs:
        trace.subscribe(first)
        trace.subscribe(second)
        trace.unsubscribe(second)
        assert [each is first for each in trace._subscribers] == [True]
        trace.unsubscribe(first)
        assert not trace.active


@pytest.mark.parametrize("times_only", [False, True])
@pytest.mark.parametrize("kind", EventKind)
def test_a_timeline_handles_every_kind_of_event(kind: EventKind, times_only: bool) -> None:
    known = at(0, EventKind.QUEUED, 1, prompt_tokens=4, waited_ns=0)
    timeline = Timeline(times_only=times_only).replay([known])
    for sequence_id in (None, 1, 2):
        timeline(Event(kind, 0, sequence_id, dict.fromkeys(COUNTS[kind], 1)))
    assert len(timeline.requests) <= 2


@pytest.mark.parametrize("times_only", [False, True])
def test_states_and_times_are_the_same_whether_or_not_blocks_are_followed(
    run: Run, times_only: bool
) -> None:
    """The server's metrics follow times only."""
    ended: list[Request] = []
    Timeline(times_only=times_only, on_end=lambda each, _: ended.append(each)).replay(run.events)
    found = {each.sequence_id: each for each in ended}
    for each in summarize(run.events):
        request = found[each.sequence_id]
        assert request.queued_ns is not None
        assert request.scheduled_ns is not None
        assert (request.scheduled_ns - request.queued_ns) / 1e6 == each.queued_ms
        assert (request.state.value, request.output_tokens) == (each.finish, each.output_tokens)
        assert (request.parent, request.preemptions) == (each.parent, each.preemptions)


MOVES = [EventKind.QUEUED, EventKind.SCHEDULED, EventKind.FORKED, EventKind.NEW_TOKEN]


@st.composite
def any_events(draw: st.DrawFn) -> list[Event]:
    """Events of every kind in any order; only their times make sense."""
    time_ns = draw(st.integers(0, 10**12))
    events = []
    kinds = st.sampled_from(EventKind) | st.sampled_from(MOVES)
    for kind in draw(st.lists(kinds, min_size=20, max_size=60)):
        time_ns += draw(st.sampled_from([0, 1, 999, 1000, 123_456_789]))
        counts = {name: draw(st.integers(0, 3)) for name in sorted(COUNTS[kind])}
        if kind is EventKind.STEP:
            counts["duration_ns"] = draw(st.integers(0, 10**9))
        sequence_id = draw(st.sampled_from([None, 0, 1, 1, 2, 2]))
        events.append(Event(kind, time_ns, sequence_id, counts))
    return events


@given(any_events())
def test_no_events_break_them(events: list[Event]) -> None:
    for each in summarize(events):
        times = (each.queued_ms, each.prefill_ms, each.ttft_ms, each.decode_ms)
        assert all(time is None or time >= 0 for time in (*times, *each.inter_token_ms))
    assert table(summarize(events))
    assert_drawable(json.loads(json.dumps(chrome_trace(events))))
    counters = counted(events, windows=(None, 3))
    assert all(total >= 0 for total in counters.as_dict().values())
    computed = counters.tokens_prefilled + counters.tokens_decoded + counters.tokens_recomputed
    scheduled = [
        event
        for event in events
        if event.kind is EventKind.SCHEDULED and event.sequence_id is not None
    ]
    assert computed == sum(event.counts["tokens"] for event in scheduled)
