"""Fixtures that many tests share; the default model is loaded once, in float32."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest

# Threads make tiny products slower, on a busy machine much slower. Torch reads this when it is
# imported.
os.environ["OMP_NUM_THREADS"] = "1"

# Settings that the tests assume, whatever a user's shell sets; child processes inherit them.
PINNED = {
    "COLUMNS": "80",
    "LINES": "25",
    "TERM": "xterm-256color",
    "PYTHONIOENCODING": "utf-8",
    "MPLBACKEND": "Agg",
    "MINIGEN_COMPILE_KERNELS": "never",  # a load would compile for as long as many tests take
}
ABSENT = {
    *("NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "PY_COLORS", "GITHUB_ACTIONS"),
    *("TTY_COMPATIBLE", "TTY_INTERACTIVE", "TERMINAL_WIDTH", "SHELL_COMPLETION"),
    *("PYTHONWARNINGS", "PYTHONOPTIMIZE", "PYTHONSAFEPATH", "PYTHONINSPECT", "PYTHONVERBOSE"),
    "PYTHONDONTWRITEBYTECODE",  # hundreds of processes would each compile the same files
    "VIRTUAL_ENV",  # that of the shell need not be the one that runs the tests
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "NETRC"),
    *("MKL_NUM_THREADS", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TRITON_INTERPRET", "NUMBA_DISABLE_JIT", "NUMBA_NUM_THREADS"),
}
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts background jobs so
    signal.signal(signal.SIGINT, signal.default_int_handler)

ABSENT_FAMILIES = ("MINIGEN_", "HF_", "HUGGING", "TRANSFORMERS_", "OPENAI_", "OLLAMA_", "PIP_")
KEPT = {"MINIGEN_HOME", "MINIGEN_CHROMIUM"}  # where the default model is, and a browser


@pytest.hookimpl(trylast=True)  # pytest itself has already read how to write to the terminal
def pytest_configure() -> None:
    """Set the same variables for all tests, and for the processes that they start."""
    for name in [*os.environ]:
        is_of_a_family = name.upper().startswith(ABSENT_FAMILIES) and name not in KEPT
        if name.upper() in ABSENT or is_of_a_family:
            del os.environ[name]
    os.environ.update(PINNED)
    sys.dont_write_bytecode = False


def pytest_runtest_setup() -> None:
    """Seed the random numbers of each test and its fixtures, whatever the order of the tests."""
    import torch  # after OMP_NUM_THREADS is set

    torch.manual_seed(0)


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """Return the default model's file; tests that need it are marked `model`."""
    from minigen import hub

    path = hub.find(hub.DEFAULT_MODEL)
    if path is None:
        pytest.fail("the default model is not on this machine: run `minigen pull`", pytrace=False)
    return path


@pytest.fixture(scope="session")
def default_llm(default_model_path: Path):
    """Load the default model in float32."""
    from minigen import LLM

    return LLM.load(default_model_path, weights="float32")


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny random Llama with a byte-level tokenizer and a chat template."""
    from tests.tiny import TINY_VOCAB, save_model, save_tokenizer

    directory = tmp_path_factory.mktemp("tiny")
    save_model(directory, "llama", vocab_size=TINY_VOCAB)
    save_tokenizer(directory)
    return directory


@pytest.fixture
def tiny_llm(tiny_directory: Path):
    """Load a new LLM of the tiny model, in float32, with four sequences at once."""
    from minigen import LLM

    return LLM.load(tiny_directory, weights="float32", max_num_seqs=4)


@pytest.fixture
def unchecked_shapes() -> Iterator[None]:
    """Run without the checks of shapes, for long runs of functions that other tests check."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Handle Ctrl-C here and in child processes, even in a shell's background job.

    Without garbage collection, in whose callbacks (hypothesis has one) a KeyboardInterrupt is lost.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()
    yield
    gc.enable()
    signal.signal(signal.SIGINT, before)
