"""Engines of one model's files share its tokenizer and its weights, as long as one uses them."""

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minigen import LLM, SamplingParams, hub
from minigen.checkpoint import quant_formats
from minigen.checkpoint.checkpoint import ModelFiles, read_model
from minigen.checkpoint.shared import Shared
from minigen.config import EngineConfig
from minigen_course import load_model, using
from minigen_course.lab import inspect_model

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


class Part:
    """Something that can be referred to weakly."""


def test_a_part_is_built_once_and_freed_after_its_last_use() -> None:
    shared = Shared()
    first = shared.get("a", Part)
    assert shared.get("a", Part) is first
    assert shared.get("b", Part) is not first
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None
    assert isinstance(shared.get("a", Part), Part)


def test_a_part_that_cannot_be_built_leaves_nothing_behind() -> None:
    shared = Shared()

    def fail() -> Part:
        raise ValueError("no memory")

    with pytest.raises(ValueError, match="no memory"):
        shared.get("a", fail)
    assert isinstance(shared.get("a", Part), Part)


def model_of(llm: LLM) -> Any:
    runner: Any = llm.engine.runner
    return runner.model if hasattr(runner, "model") else runner.shared


@pytest.mark.model
@pytest.mark.parametrize("weights", ["float32", "int4"])
def test_engines_of_the_same_files_share_weights_and_answer_alike(weights: str) -> None:
    files = read_model(hub.resolve(hub.DEFAULT_MODEL))

    def load(**options: Any) -> LLM:
        return LLM.of_files(files, EngineConfig(weights=weights, **options))

    one, other = load(num_blocks=16), load(num_blocks=40, max_num_seqs=2)
    assert model_of(one) is model_of(other)
    assert one.tokenizer is other.tokenizer
    if weights == "int4":  # tables of positions are each engine's own, as long as its cache
        lengths = [len(each.engine.runner.weights.heads.cos) for each in (one, other)]  # type: ignore[attr-defined]
        assert lengths[1] * 16 == lengths[0] * 40
        words = [each.engine.runner.weights.qkv.words for each in (one, other)]  # type: ignore[attr-defined]
        assert np.shares_memory(*words)
    alone = LLM.load(weights=weights, num_blocks=40)
    assert model_of(alone) is not model_of(one), "models that are loaded by name share nothing"
    answers = [each.generate("The sea is", GREEDY).token_ids for each in (one, other, alone)]
    assert answers[0] == answers[1] == answers[2]
    gone = weakref.ref(model_of(one))
    del one, other
    gc.collect()
    assert gone() is None, "the files alone keep no weights"


def test_other_forms_and_other_copies_share_nothing(tiny_directory: Path) -> None:
    files = read_model(tiny_directory)
    one = LLM.of_files(files, EngineConfig(weights="float32"))
    assert model_of(one) is not model_of(LLM.of_files(files, EngineConfig(weights="bfloat16")))
    again: ModelFiles = read_model(tiny_directory)
    assert model_of(one) is not model_of(LLM.of_files(again, EngineConfig(weights="float32")))


@pytest.mark.model
def test_the_course_reads_a_file_once_until_a_part_is_exchanged() -> None:
    inspect_model.share_no_more()
    one, other = (load_model(weights="float32", num_blocks=8) for _ in range(2))
    assert model_of(one) is model_of(other)
    with using(11, unpack_q4_1=quant_formats.unpack_q4_1):
        assert model_of(load_model(weights="float32", num_blocks=8)) is not model_of(one)
    assert model_of(load_model(weights="float32", num_blocks=8)) is not model_of(one)


def test_the_course_reads_a_file_again_that_has_changed(
    tmp_path: Path, tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = [read_model(tiny_directory) for _ in range(4)]
    left = iter(read)
    monkeypatch.setattr(inspect_model, "read_model", lambda path: next(left))
    inspect_model.share_no_more()
    file = tmp_path / "model.gguf"
    file.write_bytes(b"old")
    found = [inspect_model._read_once(file) for _ in range(2)]
    file.write_bytes(b"newer")
    found += [inspect_model._read_once(each) for each in (file, tmp_path, tmp_path)]
    numbers = [next(i for i, each in enumerate(read) if each is one) for one in found]
    assert numbers == [0, 0, 1, 2, 3], "a directory, whose files may change, is read each time"
    inspect_model.share_no_more()
