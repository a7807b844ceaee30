"""Perplexity and divergence: closed forms, transformers' loss, and each token scored once."""

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from minigen import LLM, SamplingParams
from minigen.assembly.cpu import linears
from minigen.bench.perplexity import (
    EngineRows,
    Estimate,
    TokenScores,
    kl_divergence,
    score,
    summarize_scores,
    transformer_rows,
    windows_of,
)
from minigen.checkpoint.checkpoint import open_checkpoint
from minigen.cli.main import app
from minigen.cli.perplexity import read_text
from minigen.errors import CapacityError, MinigenError, OptionError, RequestError, TokenizerError
from minigen.model.transformer import build_transformer
from tests.tiny import TINY_VOCAB, save_model, save_tokenizer

TEXT = "A text whose tokens are its bytes, so that a hundred letters are a hundred tokens. " * 2
IDS = [3 + 7 * each % 250 for each in range(150)]


@pytest.fixture(scope="module")
def llm(tiny_directory: Path) -> LLM:
    return LLM.load(tiny_directory, weights="float32", max_num_seqs=2)


def constant(row: list[float]) -> Any:
    """Return `Rows` that predict every token by the same logits."""

    def rows(ids: Sequence[int], first: int, num_rows: int) -> Iterator[torch.Tensor]:
        yield from torch.tensor(row).expand(len(ids) - first, -1).split(num_rows)

    return rows


# Windows


@given(st.data(), st.integers(2, 40), st.booleans())
def test_every_token_is_scored_once_in_a_window_of_the_context(
    data: st.DataObject, context: int, bos: bool
) -> None:
    size = context - bos
    stride = data.draw(st.integers(1, size if bos else size - 1))
    num_tokens = data.draw(st.integers(size, 5 * size))
    windows = windows_of(num_tokens, context, stride, bos)
    scored = [each for window in windows for each in range(window.first, window.stop)]
    assert scored == list(range(0 if bos else 1, num_tokens))
    assert all(window.stop - window.start == size for window in windows)
    assert all(window.first > window.start or bos for window in windows)
    assert all(window.first - window.start >= size - stride for window in windows[1:])


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((100, 10, 10, False), "stride 10 does not fit windows of 10 tokens: take one from 1 to 9"),
        ((100, 10, 10, True), "take one from 1 to 9"),
        ((100, 10, 0, False), "stride 0 does not fit"),
        ((9, 10, 5, False), "9 tokens, which is too short for one window of 10"),
    ],
)
def test_windows_that_do_not_fit_get_one_sentence(
    sizes: tuple[int, int, int, bool], words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        windows_of(*sizes)


# Closed forms


def test_a_uniform_model_hesitates_among_the_whole_vocabulary() -> None:
    windows = windows_of(len(IDS), 20, 7, bos=False)
    result = summarize_scores(score(constant([1.5] * 300), None, IDS, windows, None))
    assert result.perplexity.value == pytest.approx(300)
    assert result.perplexity.interval == pytest.approx((300, 300))
    assert result.num_scored == len(IDS) - 1
    assert result.num_windows == len(windows)
    assert result.comparison is None


def test_two_tokens_by_hand() -> None:
    """p = (1/4, 3/4) beside p_ref = (1/2, 1/2), of a text of zeros."""
    rows, reference = constant([0.0, math.log(3)]), constant([2.0, 2.0])
    windows = windows_of(10, 5, 2, bos=False)
    result = summarize_scores(score(rows, reference, [0] * 10, windows, None))
    found = result.comparison
    assert found is not None
    assert result.perplexity.value == pytest.approx(4)
    assert found.reference_perplexity.value == pytest.approx(2)
    assert found.ratio.value == pytest.approx(2)
    expected = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert found.kl.value == pytest.approx(expected)
    assert found.kl_percentiles == pytest.approx(dict.fromkeys(found.kl_percentiles, expected))
    assert found.same_top.value == 0, "the reference's lower token is the likelier by the rule"
    assert found.mean_change_of_p.value == pytest.approx(-0.25)
    assert found.rms_change_of_p.value == pytest.approx(0.25)


def test_a_token_without_probability_in_the_reference_adds_nothing() -> None:
    reference = torch.tensor([[0.0, 0.0, -math.inf]], dtype=torch.float64)
    logits = torch.tensor([[0.0, 0.0, math.log(2)]], dtype=torch.float64)
    assert kl_divergence(reference, logits).item() == pytest.approx(math.log(2))
    assert kl_divergence(reference, reference).item() == 0
    assert kl_divergence(logits, reference).item() == math.inf


@given(st.integers(0, 10**6))
def test_divergences_are_never_negative(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, 3, 17, dtype=torch.float64, generator=generator) * 5
    assert (kl_divergence(a, b) > 0).all()
    assert kl_divergence(a, a + 3) == pytest.approx(torch.zeros(3).numpy(), abs=1e-12)


def test_a_reference_whose_logits_are_no_numbers_is_named() -> None:
    rows, spoiled = constant([0.0, 1.0]), constant([0.0, math.nan])
    with pytest.raises(MinigenError, match="The reference's logits are not numbers"):
        score(rows, spoiled, [0, 1, 0], windows_of(3, 3, 1, bos=False), None)


def test_logits_that_are_no_numbers_are_an_error() -> None:
    rows = constant([0.0, math.nan])
    with pytest.raises(MinigenError, match="The model's logits are not numbers"):
        score(rows, None, [0] * 5, windows_of(5, 5, 2, bos=False), None)


# Intervals


def test_the_interval_is_the_one_of_scipy() -> None:
    """Equal windows: the bootstrap of the token mean is that of the windows' means."""
    scipy = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(5)
    means = rng.normal(-2, 0.3, 40)
    scores = TokenScores(np.arange(40).repeat(3), means.repeat(3))
    found = summarize_scores(scores, resamples=20_000).perplexity
    expected = scipy.bootstrap(
        (means,), lambda each, axis: np.exp(-each.mean(axis)), method="percentile", random_state=rng
    ).confidence_interval
    assert found.value == pytest.approx(math.exp(-means.mean()))
    assert found.interval == pytest.approx((expected.low, expected.high), rel=0.01)


def test_a_perplexity_beyond_all_numbers_is_infinite_and_its_logarithm_is_not() -> None:
    scores = TokenScores(np.arange(20).repeat(3), -np.linspace(700, 800, 60))
    result = summarize_scores(scores)
    assert result.mean_nll.value == pytest.approx(750)
    assert str(result.perplexity) == "inf [inf, inf]"
    assert result.mean_nll.interval == pytest.approx((737, 763), abs=3)


def test_a_ratio_is_paired() -> None:
    """What makes a window hard for both models does not widen the ratio's interval."""
    rng = np.random.default_rng(1)
    hard = rng.normal(-3, 1, 50).repeat(4)
    kl = np.zeros(200)
    scores = TokenScores(np.arange(50).repeat(4), hard - 0.1, hard, kl, kl == 0)
    result = summarize_scores(scores)
    assert result.comparison is not None
    low, high = result.comparison.ratio.interval or (0, 0)
    assert (low, high) == pytest.approx((math.exp(0.1), math.exp(0.1)))
    low, high = result.perplexity.interval or (0, 0)
    assert high / low > 1.5


def test_one_window_has_no_interval() -> None:
    result = summarize_scores(TokenScores(np.zeros(5), np.full(5, -1.0)))
    assert result.perplexity.value == pytest.approx(math.e)
    assert result.perplexity.interval is None
    assert str(result.perplexity) == "2.7183"


# Models


@pytest.mark.parametrize("bos", [None, 1])
def test_the_perplexity_is_that_of_transformers_loss(
    llm: LLM, tiny_directory: Path, bos: int | None
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_directory, dtype=torch.float32).eval()
    windows = windows_of(len(IDS), 50, 20, bos is not None)
    total, count = 0.0, 0
    for window in windows:
        begins = [] if bos is None else [bos]
        ids = torch.tensor([begins + IDS[window.start : window.stop]])
        labels = ids.clone()
        labels[:, : window.first - window.start + len(begins)] = -100
        num_scored = window.stop - window.first
        with torch.inference_mode():
            total += num_scored * float(model(ids, labels=labels).loss)
        count += num_scored
    scores = score(EngineRows(llm), None, IDS, windows, bos)
    assert len(scores.logprob) == count
    assert -scores.logprob.sum() == pytest.approx(total, rel=1e-5)


def test_an_engine_predicts_what_the_layers_alone_do(llm: LLM, tiny_directory: Path) -> None:
    checkpoint = open_checkpoint(tiny_directory)
    parts = (checkpoint.tensors, torch.float32, *linears("float32", 1))
    model = build_transformer(checkpoint.config, *parts)
    plain = transformer_rows(model, checkpoint.config.sliding_windows)
    windows = windows_of(len(IDS), 60, 25, bos=False)
    for num_rows in (7, 64):
        scores = score(EngineRows(llm), plain, IDS, windows, None, num_rows)
        assert scores.kl is not None
        assert scores.same_top is not None
        assert scores.same_top.all()
        assert np.abs(scores.kl).max() < 1e-8
        assert np.abs(scores.change_of_p).max() < 1e-5


def test_a_model_does_not_diverge_from_itself(llm: LLM, tiny_directory: Path) -> None:
    other = LLM.load(tiny_directory, weights="float32", max_num_seqs=2)
    windows = windows_of(len(IDS), 40, 20, bos=False)
    result = summarize_scores(score(EngineRows(llm), EngineRows(other), IDS, windows, None))
    assert result.comparison is not None
    assert result.comparison.kl == Estimate(0.0, (0.0, 0.0))
    assert result.comparison.ratio == Estimate(1.0, (1.0, 1.0))
    assert result.comparison.same_top.value == 1


def test_small_steps_give_the_same_scores_and_all_blocks_come_back(tiny_directory: Path) -> None:
    windows = windows_of(len(IDS), 50, 20, bos=False)
    found = []
    for most in (5, 512):
        llm = LLM.load(
            tiny_directory,
            weights="float32",
            max_num_seqs=2,
            num_blocks=4,
            max_num_batched_tokens=most,
        )
        rows = EngineRows(llm)
        found.append(score(rows, None, IDS, windows, None).logprob)
        assert rows.num_tokens == len(windows) * 49
        assert llm.kv_usage == 0
        assert llm.generate("works", SamplingParams(max_tokens=2)).token_ids
    np.testing.assert_allclose(*found, atol=1e-4)


def test_an_engine_in_use_and_a_cache_too_small_get_one_sentence(
    llm: LLM, tiny_directory: Path
) -> None:
    rows = EngineRows(llm)(IDS[:30], 1, 10)
    next(rows)
    with pytest.raises(RequestError, match="in use"):
        next(EngineRows(llm)(IDS[:30], 1, 10))
    rows.close()
    assert llm.kv_usage == 0
    small = LLM.load(tiny_directory, weights="float32", num_blocks=2)
    with pytest.raises(CapacityError, match="32 tokens is too small for a window of 33"):
        next(EngineRows(small)(IDS[:33], 1, 10))


# The command


def run(*words: str | Path) -> Any:
    return CliRunner().invoke(app, ["perplexity", *map(str, words)])


def test_the_command_prints_and_writes_what_it_measured(
    tiny_directory: Path, tmp_path: Path
) -> None:
    text, file = tmp_path / "text.txt", tmp_path / "found.json"
    text.write_text(TEXT, encoding="utf-8")
    options = ("--weights", "float32", "--text", text, "--context", "64", "--json", file)
    done = run(tiny_directory, "--reference", tiny_directory, *options)
    assert done.exception is None, done.exception
    found = json.loads(file.read_text("utf-8"))
    assert (found["context"], found["stride"], found["bos_token_id"]) == (64, 32, 1)
    assert found["num_scored"] == found["tokens"] == len(TEXT)
    assert found["perplexity"]["value"] > 1
    assert found["comparison"]["kl"]["value"] == 0
    about = found["model"]
    assert about["stored_bits_per_weight"] == 32
    assert about["stored_bytes"] == found["reference"]["stored_bytes"] > TINY_VOCAB * 48 * 4
    shown = " ".join(done.output.split())
    for words in (
        "stride 32, BOS (token 1)",
        "each follows at least 32 others",
        "32.00 bits per weight",
        "tokens/s of this evaluation",
        "bootstrap over 5 windows; too narrow",
        "same top token 1 [1, 1]",
    ):
        assert words in shown, words
    done = run(tiny_directory, *options, "--no-bos", "--stride", "10", "--max-tokens", "65")
    assert done.exception is None, done.exception
    found = json.loads(file.read_text("utf-8"))
    assert (found["bos_token_id"], found["tokens"], found["num_scored"]) == (None, 65, 64)
    assert found["reference"] is found["comparison"] is None


def test_a_broken_model_has_null_for_its_perplexity_in_json(
    tiny_directory: Path, tmp_path: Path
) -> None:
    broken, text, file = tmp_path / "broken", tmp_path / "text.txt", tmp_path / "found.json"
    shutil.copytree(tiny_directory, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"] *= 1e5
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    text.write_text(TEXT, encoding="utf-8")
    options = ("--weights", "float32", "--text", text, "--context", "64", "--json", file)
    done = run(broken, *options)
    assert done.exception is None, done.exception
    shown = " ".join(done.output.split())
    assert "perplexity inf [inf, inf] its logarithm" in shown
    found = json.loads(file.read_text("utf-8"), parse_constant=pytest.fail)
    assert found["perplexity"] == {"value": None, "interval": [None, None]}
    assert found["mean_nll"]["value"] > 710


def test_texts_come_from_files_from_stdin_and_from_python(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes("ein Gedicht über Bäume".encode())
    assert read_text(str(file)) == "ein Gedicht über Bäume"
    assert len(read_text("pydoc")) > 300_000
    file.write_bytes(b"caf\xe9")
    for name, words in (
        (str(file), "not valid UTF-8: byte 3"),
        (str(tmp_path / "none"), "cannot be read: No such file"),
        (str(tmp_path), "cannot be read"),
    ):
        with pytest.raises(OptionError, match=words):
            read_text(name)
    file.write_text(" \n", encoding="utf-8")
    with pytest.raises(OptionError, match="is empty"):
        read_text(str(file))


def test_a_mistake_gets_one_sentence(tiny_directory: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    other = tmp_path / "other"
    other.mkdir()
    save_model(other, "llama", vocab_size=TINY_VOCAB + 1)
    save_tokenizer(other)
    options = (tiny_directory, "--weights", "float32", "--text", text, "--context", "64")
    for words, kind, expected in (
        (("--context", "200"), OptionError, "more than the 128 tokens"),
        (("--stride", "64"), OptionError, "stride 64 does not fit windows of 64"),
        (("--max-tokens", "9"), OptionError, "too short for one window of 64"),
        (("--reference-weights", "int8"), OptionError, "needs --reference"),
        (("--json", tmp_path / "no" / "x.json"), OptionError, "its folder does not exist"),
        (("--json", tmp_path), OptionError, "it is a folder"),
        (("--json", text), OptionError, "would replace the file of --text"),
        (("--reference", other), TokenizerError, "300 tokens, and the reference one of 301"),
    ):
        done = run(*options, *words)
        assert isinstance(done.exception, kind), done.exception
        assert expected in str(done.exception)
    assert text.read_text("utf-8") == TEXT


def test_another_tokenizer_is_refused(tiny_directory: Path, tmp_path: Path) -> None:
    save_model(tmp_path, "llama", vocab_size=TINY_VOCAB)
    save_tokenizer(tmp_path, more_specials=("ext",))
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    options = ("--weights", "float32", "--text", text, "--context", "64")
    done = run(tiny_directory, *options, "--reference", tmp_path)
    assert isinstance(done.exception, TokenizerError)
    assert "different tokens" in str(done.exception)
