"""Fixtures that many tests share; the default model is loaded once, in float32."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # tiny products lose by threads, on a busy machine much


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's file; tests that need it are marked `model`."""
    from minigen import hub

    path = hub.find(hub.DEFAULT_MODEL)
    if path is None:
        pytest.fail("the default model is not on this machine: run `minigen pull`", pytrace=False)
    return path


@pytest.fixture(scope="session")
def default_llm(default_model_path: Path):
    """The default model, loaded in float32."""
    from minigen import LLM

    return LLM.load(default_model_path, weights="float32")


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a byte-level tokenizer and a chat template."""
    from tests.tiny import TINY_VOCAB, save_model, save_tokenizer

    directory = tmp_path_factory.mktemp("tiny")
    save_model(directory, "llama", vocab_size=TINY_VOCAB)
    save_tokenizer(directory)
    return directory


@pytest.fixture
def tiny_llm(tiny_directory: Path):
    """A fresh LLM of the tiny model, in float32, four sequences at once."""
    from minigen import LLM

    return LLM.load(tiny_directory, weights="float32", max_sequences=4)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C is heeded here and in what is started, even by a shell's background job."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
