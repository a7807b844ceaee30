"""A real server for tests: uvicorn in a thread, with models of a few thousand numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from starlette.types import ASGIApp

from minigen import LLM
from minigen.server.app import create_app
from minigen.server.local import LocalServer
from minigen.server.models import ModelHost


@contextmanager
def serving(host: ModelHost, app: ASGIApp | None = None) -> Iterator[str]:
    """Serve a host's models while the block runs; yields the address."""
    with LocalServer(app or create_app(host), host) as server:
        yield server.url


def save_tiny(directory: Path, context: int = 1024) -> Path:
    """Save a tiny random model of bytes, with a context of `context` tokens."""
    from tests.tiny import TINY_VOCAB, save_model, save_tokenizer

    save_model(directory, "llama", vocab_size=TINY_VOCAB, max_position_embeddings=context)
    save_tokenizer(directory)
    return directory


def load_tiny(directory: Path, max_num_seqs: int = 64, **options: object) -> LLM:
    """Load it in float32, so that its text is the same alone and in any batch."""
    return LLM.load(directory, weights="float32", max_num_seqs=max_num_seqs, **options)  # type: ignore[arg-type]


def engine_of(host: ModelHost) -> LLM:
    """Return the engine of a host's first model, which is loaded."""
    assert host.first.served is not None
    return host.first.served.llm


def is_empty(llm: LLM) -> bool:
    """Return whether an engine has no request left, and its blocks have no owner."""
    manager = llm.engine.scheduler.manager  # type: ignore[attr-defined]
    all_free = manager.num_available == manager.allocator.num_blocks
    return not llm.engine.live and not manager.rows and all_free
