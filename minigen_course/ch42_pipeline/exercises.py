"""Chapter 42's exercises: idle stages, layers dealt out, micro-batches, rings, and which cut."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

from minigen_course.ch42_pipeline import ring_checks
from minigen_course.ch42_pipeline.lesson.timeline import least_bubble, pass_once
from minigen_course.ch42_pipeline.reference import Devices, Model
from minigen_course.grading.exercise import expect, expect_equal

Spans = Sequence[tuple[int, float, float]]
Bubble = Callable[[Spans, int], float]
DealLayers = Callable[[Sequence[float], int], list[range]]
MicroBatches = Callable[[Sequence[int], int], list[list[int]]]
ChooseCut = Callable[[Model, Devices, int], tuple[int, int, int] | None]


# The bubble


def _expect_bubble(part: Bubble, spans: Spans, num_stages: int, right: float) -> None:
    given = list(spans)
    found = part(given, num_stages)
    shown = given if len(given) < 6 else [*given[:3], "..."]
    what = f"the idle fraction of {num_stages} stages with the spans {shown}"
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    expect(is_number, f"{what}: got {found!r}; return a number.")
    expect(abs(found - right) < 1e-6, f"{what}: got {found:.4f}; it should be {right:.4f}.")
    expect(given == list(spans), f"{what}: the spans must not change.")


def one_batch_on_two_stages(part: Bubble) -> None:
    """one micro-batch that passes two stages:"""
    _expect_bubble(part, [(0, 0.0, 1.0), (1, 1.0, 2.0)], 2, 0.5)
    _expect_bubble(part, [(0, 0.0, 1.0), (1, 1.0, 4.0)], 2, 0.5)
    _expect_bubble(part, [(0, 0.0, 3.0)], 1, 0.0)


def micro_batches_that_pass_once(part: Bubble) -> None:
    """m micro-batches that pass p equal stages once:"""
    for stages, batches in ((2, 2), (4, 4), (4, 16), (3, 1), (1, 5)):
        spans = pass_once([0.25] * stages, batches).computing()
        _expect_bubble(part, spans, stages, least_bubble(stages, batches))


def waits_between_two_spans(part: Bubble) -> None:
    """a stage that waits between two micro-batches:"""
    spans = [(0, 0.0, 1.0), (0, 3.0, 4.0), (1, 1.0, 2.0), (1, 4.0, 5.0)]
    _expect_bubble(part, spans, 2, 0.6)
    _expect_bubble(part, [(0, 0.0, 1.0), (0, 9.0, 10.0)], 1, 0.8)


def a_clock_that_does_not_begin_at_0(part: Bubble) -> None:
    """times of a clock that has run for a while:"""
    _expect_bubble(part, [(0, 70.0, 71.0), (1, 71.0, 72.0)], 2, 0.5)
    _expect_bubble(part, [(1, -2.0, -1.0), (0, -3.0, -2.0)], 2, 0.5)


def stages_without_work(part: Bubble) -> None:
    """a stage without a span, and no spans at all:"""
    _expect_bubble(part, [(0, 0.0, 2.0), (2, 2.0, 4.0)], 3, 2 / 3)
    _expect_bubble(part, [(0, 1.0, 2.0)], 4, 0.75)
    _expect_bubble(part, [], 2, 0.0)


def spans_in_any_order(part: Bubble) -> None:
    """uneven stages, with their spans in any order:"""
    drawn = random.Random(1)
    for _ in range(20):
        seconds = [drawn.uniform(0.5, 2.0) for _ in range(drawn.randint(1, 4))]
        count = drawn.randint(1, 5)
        spans = pass_once(seconds, count).computing()
        drawn.shuffle(spans)
        end = sum(seconds) + (count - 1) * max(seconds)
        _expect_bubble(part, spans, len(seconds), 1 - count * sum(seconds) / len(seconds) / end)


# Layers for stages


def _layers(work: Sequence[float]) -> str:
    """Return a text of the layers' work, short if there are many."""
    shown = [f"{each:g}" for each in work]
    if len(shown) > 10:
        shown = [*shown[:3], "...", *shown[-2:]]
    return f"{len(work)} layers with the work {', '.join(shown)}"


def _dealt(part: DealLayers, work: Sequence[float], num_stages: int) -> list[range]:
    """Call the part, and expect ranges that cover all layers in order."""
    given = list(work)
    found = part(given, num_stages)
    what = f"{num_stages} stages for {_layers(work)}"
    is_list = isinstance(found, list | tuple) and all(isinstance(each, range) for each in found)
    expect(is_list, f"{what}: got {found!r}; return a list of ranges.")
    expect_equal(len(found), num_stages, f"{what}: the number of stages")
    layers = [layer for each in found for layer in each]
    expect_equal(layers, list(range(len(work))), f"{what}: the layers of all stages, in order")
    expect(all(found), f"{what}: got {found}; each stage must have a layer.")
    expect_equal(given, list(work), f"{what}: the work, which must not change")
    return list(found)


def slowest_stage(work: Sequence[float], stages: Sequence[range]) -> float:
    """Return the work of the stage that has the most."""
    return max(sum(work[layer] for layer in each) for each in stages)


def _least(work: Sequence[float], num_stages: int) -> float:
    """Return the least work of the slowest stage, by trying all ways."""
    ways = combinations(range(1, len(work)), num_stages - 1)
    found = []
    for way in ways:
        ends = [0, *way, len(work)]
        stages = [range(*each) for each in pairwise(ends)]
        found.append(slowest_stage(work, stages))
    return min(found)


def _expect_dealt(part: DealLayers, work: Sequence[float], num_stages: int, least: float) -> None:
    stages = _dealt(part, work, num_stages)
    found = slowest_stage(work, stages)
    shown = ", ".join(f"{each.start} to {each.stop - 1}" for each in stages)
    expect(
        found <= least + 1e-9,
        f"{num_stages} stages for {_layers(work)}: your stages have the layers "
        f"{shown}, and the slowest one has the work {found:g}; it should have {least:g}.",
    )


def layers_that_divide(part: DealLayers) -> None:
    """equal layers that divide:"""
    for layers, stages in ((4, 2), (6, 3), (5, 1), (3, 3)):
        _expect_dealt(part, [1.0] * layers, stages, layers / stages)


def layers_that_do_not_divide(part: DealLayers) -> None:
    """equal layers that do not divide:"""
    for layers, stages in ((7, 2), (30, 4), (10, 4), (9, 5)):
        _expect_dealt(part, [1.0] * layers, stages, -(-layers // stages))


def a_heavy_head(part: DealLayers) -> None:
    """a last layer that counts for several, as an output head does:"""
    _expect_dealt(part, [1.0] * 30 + [8.0], 2, 19.0)
    _expect_dealt(part, [1.0] * 8 + [9.0], 3, 9.0)
    _expect_dealt(part, [8.0] + [1.0] * 8, 2, 8.0)


def no_stage_is_empty(part: DealLayers) -> None:
    """one layer with most of the work:"""
    _expect_dealt(part, [9.0, 1.0, 1.0], 3, 9.0)
    _expect_dealt(part, [1.0, 1.0, 9.0], 3, 9.0)
    _expect_dealt(part, [1.0, 9.0, 1.0, 1.0], 4, 9.0)


def where_taking_one_by_one_fails(part: DealLayers) -> None:
    """layers for which filling one stage after another up to the mean is not the best:"""
    _expect_dealt(part, [2.0, 3.0, 4.0, 5.0, 6.0], 2, 11.0)
    _expect_dealt(part, [5.0, 5.0, 5.0, 1.0], 2, 10.0)
    _expect_dealt(part, [1.0, 2.0, 6.0, 2.0, 1.0], 3, 6.0)
    _expect_dealt(part, [4.0, 3.0, 2.0, 6.0, 5.0], 3, 9.0)


def random_layers(part: DealLayers) -> None:
    """random layers, with the best of all ways:"""
    drawn = random.Random(2)
    for _ in range(40):
        work = [float(drawn.randint(1, 9)) for _ in range(drawn.randint(1, 9))]
        num_stages = drawn.randint(1, len(work))
        _expect_dealt(part, work, num_stages, _least(work, num_stages))


def more_stages_than_layers(part: DealLayers) -> None:
    """more stages than layers:"""
    for work, num_stages in (([1.0], 2), ([1.0, 2.0], 5), ([], 1)):
        try:
            found = part(list(work), num_stages)
        except ValueError as error:
            expect(str(error), "the ValueError should say what is wrong.")
            continue
        what = f"{num_stages} stages for {len(work)} layers"
        expect(False, f"{what}: got {found!r}; it should raise ValueError.")


# Micro-batches


def _expect_batches(
    part: MicroBatches, num_tokens: list[int], num_batches: int, right: list[list[int]]
) -> None:
    given = list(num_tokens)
    found = part(given, num_batches)
    what = f"{num_batches} micro-batches of sequences with {num_tokens} tokens"
    is_list = isinstance(found, list) and all(isinstance(each, list) for each in found)
    expect(is_list, f"{what}: got {found!r}; return a list of lists.")
    expect_equal(given, num_tokens, f"{what}: the numbers of tokens, which must not change")
    numbers = sorted(each for batch in found for each in batch)
    expect_equal(numbers, list(range(len(num_tokens))), f"{what}: the sequences of all of them")
    expect_equal(found, right, what)


def decode_in_equal_parts(part: MicroBatches) -> None:
    """sequences that decode, with one token each:"""
    _expect_batches(part, [1, 1, 1, 1], 2, [[0, 2], [1, 3]])
    _expect_batches(part, [1, 1, 1, 1, 1], 3, [[0, 3], [1, 4], [2]])
    _expect_batches(part, [1, 1, 1], 1, [[0, 1, 2]])


def a_prompt_among_decodes(part: MicroBatches) -> None:
    """a prompt's chunk among sequences that decode:"""
    _expect_batches(part, [1, 1, 6, 1], 2, [[2], [0, 1, 3]])
    _expect_batches(part, [1, 7, 1, 1, 5, 1, 1], 2, [[1, 3, 6], [0, 2, 4, 5]])


def fewer_sequences_than_batches(part: MicroBatches) -> None:
    """fewer sequences than micro-batches:"""
    _expect_batches(part, [4, 9], 4, [[1], [0]])
    _expect_batches(part, [3], 2, [[0]])
    _expect_batches(part, [], 3, [])


def the_longest_goes_first(part: MicroBatches) -> None:
    """sequences of which the longest comes last:"""
    _expect_batches(part, [2, 2, 3, 3, 4], 2, [[0, 1, 4], [2, 3]])
    _expect_batches(part, [1, 2, 3, 4, 5, 6], 3, [[0, 5], [1, 4], [2, 3]])


def equal_totals(part: MicroBatches) -> None:
    """micro-batches with equal totals: the first one gets the sequence:"""
    _expect_batches(part, [3, 3, 2, 2], 2, [[0, 2], [1, 3]])
    _expect_batches(part, [5, 5, 5, 5, 1], 4, [[0, 4], [1], [2], [3]])


def random_steps(part: MicroBatches) -> None:
    """random steps:"""
    drawn = random.Random(3)
    for _ in range(40):
        num_tokens = [drawn.choice((1, 1, 2, 5, 9, 16)) for _ in range(drawn.randint(0, 9))]
        num_batches = drawn.randint(1, 4)
        totals: dict[int, list[int]] = {}
        loads = [0] * num_batches
        order = [(-each, number) for number, each in enumerate(num_tokens)]
        for tokens, number in sorted(order):
            least = min(range(num_batches), key=loads.__getitem__)
            loads[least] -= tokens
            totals.setdefault(least, []).append(number)
        right = [sorted(totals[each]) for each in sorted(totals)]
        _expect_batches(part, num_tokens, num_batches, right)


# Which cut

SMALL = Model(layers=8, kv_heads=4, weight_bytes=16e9, cache_bytes=1e9)
FOUR = Devices(4, 80e9, 1e12, {1: 0.0, 2: 10e-6, 4: 30e-6}, 5e-6)


def _seconds(model: Model, devices: Devices, count: int, cut: tuple[int, int, int]) -> float:
    t, p, d = cut
    b = -(-count // d)
    m = min(p, b)
    stage = (model.weight_bytes + b / m * model.cache_bytes) / (t * p * devices.bandwidth)
    stage += 2 * model.layers / p * devices.all_reduce[t]
    return p * stage + (p * devices.transfer if p > 1 else 0.0)


def _allowed(model: Model, devices: Devices, count: int) -> list[tuple[int, int, int]]:
    sizes = range(1, devices.num_devices + 1)
    return [
        (t, p, d)
        for t in sizes
        for p in sizes
        for d in sizes
        if t * p * d == devices.num_devices
        and model.kv_heads % t == 0
        and t in devices.all_reduce
        and p <= model.layers
        and d <= count
        and (model.weight_bytes + -(-count // d) * model.cache_bytes) / (t * p) <= devices.memory
    ]


def _expect_cut(part: ChooseCut, model: Model, devices: Devices, count: int) -> None:
    allowed = _allowed(model, devices, count)
    times = {cut: _seconds(model, devices, count, cut) for cut in allowed}
    right = min(allowed, key=lambda cut: (times[cut], cut)) if allowed else None
    found = part(model, devices, count)
    what = f"{count} sequences, {_cut_text(model, devices)}"
    if right is None:
        expect(found is None, f"got {found!r}; it should be None, as nothing fits, for {what}.")
        return
    is_cut = isinstance(found, tuple | list) and len(found) == 3
    expect(is_cut, f"got {found!r}; return the sizes t, p and d, for {what}.")
    t, p, d = found or (0, 0, 0)
    cut = (int(t), int(p), int(d))
    expect(cut in times, f"{cut} is not allowed; it should be one of {allowed}, for {what}.")
    if cut != right:
        seconds = (
            f"{1e3 * times[cut]:.4g} ms; it should be {right} with {1e3 * times[right]:.4g} ms"
        )
        expect(False, f"{cut} takes {seconds}, for {what}.")


def _cut_text(model: Model, devices: Devices) -> str:
    """Return a model and its devices in words."""
    sums = ", ".join(f"{t}: {1e6 * each:.3g}" for t, each in devices.all_reduce.items())
    return (
        f"{model.layers} layers, {model.kv_heads} KV heads, {model.weight_bytes / 1e9:.3g} GB of "
        f"weights, {model.cache_bytes / 1e9:.3g} GB of cache per sequence, {devices.num_devices} "
        f"devices of {devices.memory / 1e9:.3g} GB with {devices.bandwidth / 1e9:.4g} GB/s, "
        f"all-reduces of {{{sums}}} µs, transfers of {1e6 * devices.transfer:.3g} µs"
    )


def one_sequence_wants_a_tensor_split(part: ChooseCut) -> None:
    """one sequence, with a fast link and with a slow one:"""
    _expect_cut(part, SMALL, FOUR, 1)
    _expect_cut(part, SMALL, replace(FOUR, all_reduce={1: 0.0, 2: 2e-3, 4: 5e-3}), 1)
    _expect_cut(part, SMALL, replace(FOUR, all_reduce={1: 0.0}), 1)


def many_sequences(part: ChooseCut) -> None:
    """many sequences, whose caches are read too:"""
    for count in (2, 3, 4, 8, 40):
        _expect_cut(part, SMALL, FOUR, count)
        _expect_cut(part, SMALL, replace(FOUR, all_reduce={1: 0.0, 2: 2e-3, 4: 5e-3}), count)


def the_memory_decides(part: ChooseCut) -> None:
    """devices whose memory is too small for replicas, or for all:"""
    for memory in (20e9, 12e9, 10.5e9, 6e9, 3e9):
        for count in (1, 4, 8, 16):
            _expect_cut(part, SMALL, replace(FOUR, memory=memory), count)


def heads_and_layers_that_do_not_divide(part: ChooseCut) -> None:
    """models with 3 KV heads, and with few layers:"""
    three = replace(SMALL, kv_heads=3)
    six = Devices(6, 80e9, 1e12, {1: 0.0, 2: 9e-6, 3: 12e-6, 6: 30e-6}, 5e-6)
    for count in (1, 2, 5):
        _expect_cut(part, three, six, count)
        _expect_cut(part, replace(three, layers=2), six, count)
        _expect_cut(part, replace(SMALL, layers=1, kv_heads=1), FOUR, count)


def equal_times(part: ChooseCut) -> None:
    """links that cost nothing, so that several cuts take equally long:"""
    free = replace(FOUR, all_reduce={1: 0.0, 2: 0.0, 4: 0.0}, transfer=0.0, bandwidth=2.0**40)
    model = replace(SMALL, weight_bytes=2.0**34, cache_bytes=2.0**30)
    for count in (1, 4):
        _expect_cut(part, model, free, count)
    model = replace(model, cache_bytes=0.0)  # a split that gains what its messages cost
    for count in (1, 2, 4):
        _expect_cut(
            part, model, replace(free, num_devices=2, all_reduce={1: 0.0, 2: 2**-11}), count
        )


def random_devices(part: ChooseCut) -> None:
    """random models and devices:"""
    drawn = random.Random(4)
    for _ in range(60):
        number = drawn.choice((1, 2, 4, 6, 8, 12))
        latency = 10 ** drawn.uniform(-6, -3)
        sums: Mapping[int, float] = {
            t: latency * (t - 1) for t in range(1, number + 1) if t < 9 and number % t == 0
        }
        model = Model(
            drawn.choice((2, 8, 30, 80)),
            drawn.choice((1, 2, 3, 8)),
            drawn.uniform(1, 200) * 1e9,
            drawn.uniform(0.05, 5) * 1e9,
        )
        memory = drawn.choice((24e9, 80e9, 400e9))
        devices = Devices(number, memory, 2e12, sums, 10 ** drawn.uniform(-6, -3))
        _expect_cut(part, model, devices, drawn.choice((1, 3, 16, 64)))


CHECKS = {
    "bubble": (
        one_batch_on_two_stages,
        micro_batches_that_pass_once,
        waits_between_two_spans,
        a_clock_that_does_not_begin_at_0,
        stages_without_work,
        spans_in_any_order,
    ),
    "deal_layers": (
        layers_that_divide,
        layers_that_do_not_divide,
        a_heavy_head,
        no_stage_is_empty,
        where_taking_one_by_one_fails,
        random_layers,
        more_stages_than_layers,
    ),
    "micro_batches": (
        decode_in_equal_parts,
        a_prompt_among_decodes,
        fewer_sequences_than_batches,
        the_longest_goes_first,
        equal_totals,
        random_steps,
    ),
    **ring_checks.CHECKS,
    "choose_cut": (
        one_sequence_wants_a_tensor_split,
        many_sequences,
        the_memory_decides,
        heads_and_layers_that_do_not_divide,
        equal_times,
        random_devices,
    ),
}
