"""Figures of chapter 34 show the given numbers; learners' roundings and products are used."""

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from minigen import LLM
from minigen.checkpoint.safetensors import StoredTensor
from minigen.errors import CapacityError, PromptError
from minigen.kernels.cpu.packed_weights import by_panels, pack_weight
from minigen_course.ch34_cpu_kernels.figures import (
    GROUPS,
    LANES,
    WORDS,
    bars,
    byte_dots,
    forms,
    loads,
    machine,
    phase,
    place_of,
    rounding,
    staircase,
    steps_of_scales,
    tasks_of_phase,
    words_of_load,
)
from minigen_course.ch34_cpu_kernels.lesson import (
    ROOFS,
    bits_a_weight,
    continue_in_bytes,
    continue_in_codes,
    continue_rounded,
    log_probabilities_of,
    parts_of_time,
    perplexity_cost,
    possible_fits,
    processor_parts,
    quantise_groups,
    rate_and_constant,
    relative_error,
    round_weights,
    rounded,
    scores,
    table_of_roofs,
)
from minigen_course.ch34_cpu_kernels.reference import (
    ByteRows,
    CodeRows,
    multiply_bytes,
    multiply_codes,
)
from minigen_course.figures.roofline import roofline
from minigen_course.figures.show import best_seconds
from minigen_course.lab.cost_model import Machine, Step
from minigen_course.lab.inspect_model import (
    agreement,
    load_model,
    perplexity_of,
    read_along,
    read_at_once,
)


def test_a_load_reads_the_order_of_the_packed_weights() -> None:
    words = np.arange(LANES * GROUPS * WORDS, dtype=np.int32).reshape(LANES, GROUPS, WORDS)
    for by_panels_, memory in ((False, words.reshape(-1)), (True, by_panels(words))):
        for load in range(WORDS):
            taken = words_of_load(load, 5, by_panels_)
            places = [place_of(word, by_panels_) for word in taken]
            assert places == list(range(places[0], places[0] + LANES))  # one load
            assert memory[places].tolist() == [words[word] for word in taken]


def test_by_rows_a_load_holds_two_groups_of_one_row() -> None:
    for load in range(WORDS):
        taken = words_of_load(load, 7, by_panels=False)
        assert {(row, group) for row, group, _ in taken} == {(7, 2 * load), (7, 2 * load + 1)}
        assert len({group for _, group, _ in words_of_load(load, 7, by_panels=True)}) == 1


def test_the_picture_of_a_load_shows_how_many_rows_are_in_the_register() -> None:
    left, right, below_left, below_right = loads(2, 5).axes
    assert left.get_title(loc="left") == "By rows: load 2 of row 5 takes its groups 4 and 5"
    assert right.get_title(loc="left") == "In a panel: word 2 of all rows"
    assert below_left.get_title(loc="left").startswith("the register: 1 row, 2 groups")
    assert below_right.get_title(loc="left").startswith("the register: 16 rows, 1 group")
    assert [each.get_text() for each in below_left.texts] == ["r5\ng4"] * 8 + ["r5\ng5"] * 8
    assert [each.get_text() for each in below_right.texts] == [f"r{row}" for row in range(16)]
    assert left.texts[5 * 2 * WORDS].get_text() == str((5 * GROUPS + 4) * WORDS) == "752"
    assert right.texts[5 * WORDS + 2].get_text() == str(2 * LANES + 5)
    for load, row in ((8, 0), (-1, 0), (0, 16)):
        with pytest.raises(ValueError, match="loads are 0 to 7, and rows 0 to 15"):
            loads(load, row)


def test_byte_dots_are_written_as_they_are() -> None:
    codes = np.arange(64).reshape(16, 4)
    (axes,) = byte_dots(codes, [1, -2, 3, 4], list(range(100, 116))).axes
    texts = [each.get_text() for each in axes.texts]
    numbers = [text for text in texts if text.lstrip("-").isdigit()]
    assert numbers[:16] == [str(4 * lane) for lane in range(16)]
    assert numbers[64:80] == ["1"] * 16
    assert numbers[80:96] == ["-2"] * 16
    assert numbers[-16:] == [str(each) for each in range(100, 116)]


def test_bars_are_the_numbers_they_are_given() -> None:
    (axes,) = bars({"a": 3.0, "b": 5.0}, 6.0, "GB", "title").axes
    assert [bar.get_width() for bar in axes.patches] == [3, 5]
    assert axes.lines[0].get_xdata()[0] == 6


def test_the_fitted_line_and_all_measured_times_are_drawn() -> None:
    num_bytes = {"a": 1e8, "b": 2e8}
    seconds = {"a": [4e-3, 8e-3, 5e-3], "b": [9e-3, 10e-3, 14e-3]}
    (axes,) = forms(num_bytes, seconds, 40e9, 20e9, 5e-4).axes
    full, fitted, *points = axes.lines
    assert full.get_ydata()[0] == 0
    assert fitted.get_ydata()[0] == pytest.approx(0.5)
    assert [line.get_xdata()[0] for line in points[:2]] == pytest.approx([100, 200])
    assert [line.get_ydata()[0] for line in points[:2]] == pytest.approx([5, 10])  # medians
    assert "0.50 ms" in axes.get_title(loc="left")


def test_the_machine_and_the_staircase_are_drawn() -> None:
    (axes,) = machine().axes
    assert {"registers", "memory"} <= {each.get_text() for each in axes.texts}
    (axes,) = staircase({2**14: 80e9, 2**20: 40e9, 2**28: 10e9}).axes
    assert list(axes.lines[0].get_ydata()) == [80, 40, 10]
    assert axes.get_title(loc="left") == "16 KB are read 8.0 times as fast as 256 MB"


@pytest.mark.parametrize("steals", [False, True])
@pytest.mark.parametrize("away", [0, 3, 12])
def test_every_task_of_a_phase_runs_once(away: float, steals: bool) -> None:
    done = tasks_of_phase(away, steals)
    assert sorted(owner for _, owner, _, _ in done) == sorted([*range(4)] * 6)
    for thread in range(4):
        own = [(begin, end) for who, _, begin, end in done if who == thread]
        assert all(one[1] <= other[0] for one, other in pairwise(own))
    end = max(each[3] for each in done)
    if not steals:
        assert end == 6 + away
    elif away:
        assert end == max(7, 3 + away)  # the task in hand, or what the others took over


def test_a_phase_is_drawn_without_and_with_stealing() -> None:
    fixed, stealing = phase(6).axes
    assert fixed.get_title(loc="left") == "Fixed shares: 12 tasks long"
    assert stealing.get_title(loc="left") == "Free threads take over: 9 tasks long"
    with pytest.raises(ValueError, match="choose 0 to 12"):
        phase(13)


def test_a_roofline_may_be_of_other_operations() -> None:
    machine = Machine("slow", bandwidth=1e9, flops=1e10)
    (axes,) = roofline(machine, {"1": (Step(1e9, 0, 1e9), 1.0)}, "operations").axes
    assert axes.get_ylabel() == "operations (log scale)"


def test_an_outlier_costs_its_neighbours_only_where_they_share_its_scale() -> None:
    numbers = np.ones(64, np.float32)
    numbers[3] = 1000
    (axes,) = steps_of_scales(numbers).axes
    assert axes.get_title(loc="left") == (
        "Become 0: 63 with one scale for this token, 31 with a scale for each 32"
    )
    rows = torch.from_numpy(np.stack([numbers, np.ones(64, np.float32)]))
    zeros = {share: int((rounded(share)(rows) == 0).sum()) for share in ("text", "token", 32)}
    assert zeros == {"text": 127, "token": 63, 32: 31}


def some_rows(num_rows: int, width: int) -> np.ndarray:
    return np.random.default_rng(34).standard_normal((num_rows, width)).astype(np.float32)


def test_four_bits_in_groups_of_32_equal_the_packages_rounding() -> None:
    rows = some_rows(16, 96)
    data = torch.from_numpy(rows).view(torch.uint8)
    packed = pack_weight(StoredTensor("weight", "F32", rows.shape, data), "int4")
    made = round_weights(rows, 4, 32)
    groups = packed[0].reshape(3, 80)
    scales, offsets = (groups[:, first : first + 8].copy() for first in (64, 72))
    mine = by_panels(made.scales[..., None])
    assert np.array_equal(mine, scales.view(np.float16).reshape(-1))
    minima = offsets.view(np.int16).reshape(-1) / np.float32(256) * mine
    assert (np.abs(minima - by_panels(made.minima[..., None])) <= mine / 511).all()
    codes = made.codes.reshape(16, 3, 32)
    words = np.ascontiguousarray(codes[..., :16] | codes[..., 16:] << 4).view(np.int32)
    assert np.array_equal(by_panels(words), groups[:, :64].reshape(-1))


@pytest.mark.parametrize("size", [1, 8, 40, 96, 128])
@pytest.mark.parametrize("bits", [1, 2, 8])
def test_weights_are_rounded_by_at_most_half_a_step(bits: int, size: int) -> None:
    rows = some_rows(5, 96)
    made = round_weights(rows, bits, size)
    assert made.scales.shape == made.minima.shape == (5, -(-96 // size))
    steps = np.repeat(made.scales, size, axis=1)[:, :96]
    off = np.abs(made.numbers() - rows)
    assert (off <= 0.5 * steps + 2e-3 * np.abs(rows).max()).all()
    again = round_weights(made.numbers(), bits, size)
    np.testing.assert_allclose(again.numbers(), made.numbers(), atol=4e-3)


def test_bits_and_errors_are_counted_with_scales() -> None:
    assert bits_a_weight(96, 4, 32) == 5
    assert bits_a_weight(96, 4, 96) == pytest.approx(4 + 1 / 3)
    assert bits_a_weight(96, 4, 64) == pytest.approx(4 + 2 / 3)
    rows = some_rows(5, 96)
    assert relative_error(rows, 1, 1) < 1e-3
    errors = [relative_error(rows, bits, 32) for bits in range(1, 9)]
    assert errors == sorted(errors, reverse=True)
    assert relative_error(rows, 4, 8) < relative_error(rows, 4, 32) < relative_error(rows, 4, 96)
    for bits, size in ((0, 8), (9, 8), (4, 0)):
        with pytest.raises(ValueError, match="1 to 8 bits, and groups of at least 1"):
            round_weights(rows, bits, size)


def test_the_picture_of_a_rounding_has_a_ladder_for_each_group() -> None:
    rows = some_rows(4, 192)
    left, right = rounding(rows, 2, 3, 40).axes
    (ladders,) = (each for each in left.collections if len(each.get_segments()) == 4 * 8)
    ends = {(segment[0][0], segment[1][0]) for segment in ladders.get_segments()}
    assert ends == {(-0.5, 39.5), (39.5, 79.5), (79.5, 119.5), (119.5, 127.5)}
    assert left.lines[-1].get_ydata().tolist() == rows[2, :128].tolist()
    assert left.get_title(loc="left").startswith("8 values for each 40 numbers, the widest ")
    expected = f"{bits_a_weight(192, 3, 40):.2f} bits per number, error "
    assert right.get_title(loc="left").startswith(expected)
    names = [each.get_text() for each in right.get_legend().get_texts()]
    assert names == [*(f"groups of {size}" for size in (8, 32, 128)), "whole rows", "groups of 40"]
    for row in (-1, 4):
        with pytest.raises(ValueError, match="rows 0 to 3"):
            rounding(rows, row, 4, 32)


def test_a_picture_of_weights_that_lose_nothing_can_be_drawn() -> None:
    rows = round_weights(some_rows(2, 64), 4, 32).numbers()
    _, right = rounding(rows, 0, 4, 32).axes
    assert right.get_title(loc="left") == "5.00 bits per number, error 0 %"
    rounding(np.zeros((1, 64), np.float32) + 1, 0, 4, 32)


def test_agreement_and_perplexity_of_known_counts() -> None:
    sure = torch.eye(4)[[1, 2, 3]] * 100
    other = torch.eye(4)[[1, 0, 3]] * 100
    assert agreement([sure], [other]) == pytest.approx(2 / 3)
    assert perplexity_of([sure], [[0, 1, 2]]) == pytest.approx(1)
    assert perplexity_of([torch.zeros(3, 4)] * 2, [[0, 1, 2]] * 2) == pytest.approx(4)


def test_the_best_time_is_of_the_requested_runs_after_one_uncounted_run() -> None:
    runs: list[int] = []
    assert best_seconds(lambda: runs.append(1), 3) >= 0
    assert len(runs) == 4


@pytest.mark.model
def test_a_text_read_in_chunks_gives_the_logits_of_the_whole_text() -> None:
    llm = load_model(weights="float32")
    texts = llm.tokenizer.encode("The old lighthouse stands on"), llm.tokenizer.encode("Tea is")
    reading = read_along(llm, *texts)
    assert len(reading.seconds) == max(len(text) for text in texts)
    assert min(reading.seconds) <= reading.step_seconds <= max(reading.seconds)
    for text, logits in zip(texts, reading.logits, strict=True):
        torch.testing.assert_close(logits, scores(llm, text), atol=1e-2, rtol=1e-3)
    read_along(llm, texts[0])  # all blocks were freed


@pytest.mark.model
def test_texts_read_at_once_give_the_logits_of_each_token_read_alone() -> None:
    llm = load_model(weights="int4")
    texts = llm.tokenizer.encode("The old lighthouse stands on"), llm.tokenizer.encode("Tea is")
    for _ in range(2):  # all blocks were freed, and no prefix is shared
        found = read_at_once(llm, *texts)
        for mine, right in zip(found, read_along(llm, *texts).logits, strict=True):
            torch.testing.assert_close(mine, right, atol=1e-2, rtol=1e-3)


def test_texts_that_do_not_fit_are_refused_and_leave_no_blocks(tiny_directory: Path) -> None:
    small = LLM.load(tiny_directory, weights="float32", num_blocks=2, max_num_seqs=2)
    one_block = [3] * 16
    for read in (read_along, read_at_once):
        with pytest.raises(CapacityError, match="33 tokens, and room for 32"):
            read(small, [*one_block, *one_block, 3])
        with pytest.raises(CapacityError, match="too few free blocks"):
            read(small, one_block[1:], [*one_block, 3])
        with pytest.raises(CapacityError, match="too few free blocks"):
            read(small, [3], [4], [5])
        for texts in ([], [[]], [[3], []]):
            with pytest.raises(PromptError, match="A text has no tokens"):
                read(small, *texts)
    most = small.options.max_num_batched_tokens
    with pytest.raises(CapacityError, match=f"too many for one step of at most {most}"):
        read_at_once(small, *[one_block] * (most // 16 + 1))
    assert small.kv_usage == 0
    assert [len(each) for each in read_at_once(small, one_block, one_block[1:])] == [16, 15]


@pytest.mark.model
def test_a_learners_rounding_is_used_by_the_products() -> None:
    llm = load_model(weights="float32")
    sizes = []

    def mine(rows: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        sizes.append(size)
        return quantise_groups(rows, size)

    assert continue_rounded(llm, "Tea is", 2, mine).startswith("Tea is")
    assert len(sizes) == 2 * (4 * llm.config.num_layers + 1)
    assert set(sizes) == {32}


@pytest.mark.model
def test_a_learners_product_runs_in_the_first_layer() -> None:
    llm = load_model(weights="float32")
    shapes = []

    def mine(weights: CodeRows, inputs: ByteRows) -> np.ndarray:
        shapes.append((len(inputs.numbers), *weights.codes.shape))
        return multiply_codes(weights, inputs)

    prompt = "The capital of France is"
    assert continue_in_codes(llm, prompt, 2, mine).startswith(f"{prompt} Paris")
    length = len(llm.tokenizer.encode(prompt))
    hidden = llm.config.hidden
    assert shapes == [(length + more, hidden, hidden // 32, 32) for more in range(2)]


@pytest.mark.model
def test_a_learners_product_of_bytes_runs_in_the_first_layer() -> None:
    llm = load_model(weights="float32")
    calls = []

    def mine(*given: np.ndarray) -> np.ndarray:
        calls.append([each.shape for each in given])
        return multiply_bytes(*given)

    prompt = "The capital of France is"
    assert continue_in_bytes(llm, prompt, 1, mine).startswith(f"{prompt} Paris")
    hidden, groups = llm.config.hidden, llm.config.hidden // 32
    assert calls[0] == [(hidden, groups, 32), (hidden, groups), (groups, 32), (groups,)]
    assert len(calls) == len(llm.tokenizer.encode(prompt))


def test_the_parts_of_a_steps_time_add_up() -> None:
    parts = parts_of_time(1e8, 6e-3, bandwidth=40e9, rate=20e9, constant=5e-4)
    assert parts == pytest.approx((2.5e-3, 2.5e-3, 5e-4, 5e-4))
    assert sum(parts) == pytest.approx(6e-3)


def test_processors_are_described_by_their_features() -> None:
    apple = processor_parts(["+neon", "+dotprod", "+bf16"], "arm64")
    assert apple["SIMD register"] == "128 bits, 4 lanes of float32"
    assert apple["FMA"] == apple["bfloat16 dot product"] == "yes"
    assert apple["byte dot product"] == "sdot"
    plain = processor_parts(["+sse2"], "x86_64")
    assert list(plain.values()) == ["128 bits, 4 lanes of float32", "no", "none", "no", "no"]
    middle = processor_parts(["+avx", "+avx2", "+fma", "+avxvnni"], "AMD64")
    assert middle["SIMD register"].startswith("256 bits, 8 lanes")
    assert middle["byte dot product"] == "vpdpbusd (AVX-VNNI)"
    assert middle["AMX tiles"] == "no"
    assert processor_parts(["+amx-tile", "+amx-bf16"], "x86_64")["AMX tiles"] == "yes"
    wide = processor_parts(["+avx512f", "+avx2", "+fma", "+avx512vnni", "+avx512bf16"], "x86_64")
    assert wide["SIMD register"].startswith("512 bits, 16 lanes")
    assert wide["byte dot product"] == "vpdpbusd (AVX512-VNNI)"


def test_a_cost_in_perplexity_has_an_interval() -> None:
    ids = [0, 1, 2, 3]
    exact = torch.zeros(4, 8)
    worse = exact.clone()
    worse[torch.arange(3), torch.tensor(ids[1:])] = -torch.tensor([0.1, 0.2, 0.3])
    found, right = (log_probabilities_of([each], [ids]) for each in (worse, exact))
    cost, margin = perplexity_cost(found, right)
    ratio = perplexity_of([worse], [ids]) / perplexity_of([exact], [ids])
    assert cost == pytest.approx(100 * (ratio - 1))
    assert 0 < margin < cost
    assert perplexity_cost(right, right) == (0, 0)


def test_log_probabilities_are_those_of_whole_texts() -> None:
    texts = [list(range(length)) for length in (1, 2, 17, 18, 40)]
    logits = [torch.randn(len(ids), 50) for ids in texts]
    found = log_probabilities_of(logits, texts)
    assert len(found) == sum(len(ids) - 1 for ids in texts)
    expected = math.log(perplexity_of(logits, texts))
    assert float(found.mean()) == pytest.approx(-expected)


def test_a_constant_is_distinguished_from_a_lower_rate() -> None:
    num_bytes = [96e6, 143e6, 269e6]
    rate, constant = rate_and_constant(num_bytes, [each / 30e9 + 0.5e-3 for each in num_bytes])
    assert (rate, constant) == pytest.approx((30e9, 0.5e-3))
    _, none = rate_and_constant(num_bytes, [each / 20e9 for each in num_bytes])
    assert none == pytest.approx(0, abs=1e-9)


def test_a_form_off_the_line_shifts_the_constant_by_more_than_its_own_share() -> None:
    num_bytes = [269e6, 143e6, 96e6]
    seconds = [each / 30e9 + 0.1e-3 for each in num_bytes]
    exact, *others = possible_fits(num_bytes, seconds, 0.02)
    assert exact == pytest.approx((30e9, 0.1e-3))
    assert len(others) == 2 * 3
    constants = [constant for _, constant in others]
    assert min(constants) < 0 < max(constants)  # so 0.1 ms is not clear
    assert min(constants) + max(constants) == pytest.approx(2 * 0.1e-3)
    assert set(possible_fits(num_bytes, seconds, 0)[1:]) == {exact}


def test_small_groups_pay_where_there_are_outliers_and_not_elsewhere() -> None:
    plain = np.random.default_rng(0).standard_normal((64, 512), dtype=np.float32)
    wild = plain.copy()
    wild[:, ::128] *= 100  # an outlier in each group of 128
    for rows, pays in ((plain, False), (wild, True)):
        small, large = relative_error(rows, 4, 32), relative_error(rows, 5, 128)
        assert bits_a_weight(512, 4, 32) < bits_a_weight(512, 5, 128)
        assert (small < large) == pays


def test_the_roofs_of_other_processors_are_the_benchmarks() -> None:
    results = Path(__file__).parents[1] / "benchmarks" / "results"
    stored = json.loads((results / "34_roofs.json").read_text(encoding="utf-8"))
    for name, roof in ROOFS.items():
        found = stored["intel-xeon-amx" if name == "amx" else f"intel-xeon-amx-{name}"]
        assert roof.bandwidth == pytest.approx(found["bandwidth"], rel=0.002)
        for form, peak in found["peaks"].items():
            assert getattr(roof, form) == pytest.approx(peak, rel=0.002)
    assert len({len(line) for line in table_of_roofs().splitlines()}) == 1
