"""Draw the way of a request through the modules: `python -m tools.request_path`.

`--write` puts the drawing into docs/architecture.md; a test compares.

It records the Python calls of one short `LLM.generate` on a tiny random model, and draws them as a
Mermaid sequence diagram, with one participant per module, or per package that computes (`WORK`).

A **room** is a module that passes the request on: it has a frame on the call stack when the prompt
becomes a sequence, when the sequence is queued, when the model runs, when the token is sampled, or
when the token is handed to its request. The packages that compute are not rooms, and neither are
modules that only answer a call of a room, such as the scheduler or the sequence itself; the drawing
shows these, too.
"""

import json
import sys
from collections.abc import Generator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import randn

from minigen import LLM, SamplingParams
from minigen.checkpoint.config_json import read_config
from minigen.model.transformer import expected_tensors
from tools.chapters import ROOT, replaced

PAGE = ROOT / "docs" / "architecture.md"
MARKS = ("<!-- request path -->", "<!-- /request path -->")
WORK = ("tokenizer", "sampling", "kv_cache", "model", "kernels", "trace")
LAYERS = "kernels.onednn"  # some machines multiply a model's linear layers by it: the same drawing
MOST_NAMED = 3  # functions at one arrow
PHASES = {"in": "in", "step": "a step", "out": "out"}
ARRIVALS = {  # the calls by which the request comes nearer to its token: module, function
    ("sequence", "__post_init__"),
    ("engine.scheduler", "add"),
    ("model", "__call__"),
    ("sampling", "__call__"),
    ("outputs", "push"),
}
CONFIG = {
    **{"model_type": "llama", "vocab_size": 257, "hidden_size": 16, "intermediate_size": 32},
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"max_position_embeddings": 64, "eos_token_id": 256},
}


class Recording:
    """The calls of one request.

    `calls` has the functions that one module calls in another, by the phase and in the order of
    their first call; `rooms` are in the order of their first arrival.
    """

    def __init__(self) -> None:
        self.calls: dict[str, dict[tuple[str, str], list[str]]] = {phase: {} for phase in PHASES}
        self._known: set[tuple[str, str, str]] = set()
        self.rooms: dict[str, None] = {}
        self._phase = "in"

    @contextmanager
    def recorded(self) -> Generator[None, None, None]:
        """Record the calls of this thread while the block runs."""
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        name, function = module_of(frame), frame.f_code.co_name
        if name is None or function.startswith("<") or event not in ("call", "return"):
            return
        is_step = (name, function) == ("engine.engine", "step")
        if event == "return":
            self._phase = "out" if is_step else self._phase
            return
        self._phase = "step" if is_step else self._phase
        above = callers(frame)
        caller = above[0] if above else name
        if caller != name and (caller, name, function) not in self._known:
            self._known.add((caller, name, function))
            self.calls[self._phase].setdefault((caller, name), []).append(function)
        if (name, function) in ARRIVALS:
            rooms = [each for each in reversed(above) if each not in (*WORK, name)]
            self.rooms |= dict.fromkeys(rooms)


def module_of(frame: FrameType | None) -> str | None:
    """Return the module of a frame without its package's name, or the package if it is work."""
    package, _, name = ("" if frame is None else frame.f_globals.get("__name__", "")).partition(".")
    if package != "minigen" or not name:
        return None
    if name == LAYERS:
        return "model"
    return name.partition(".")[0] if name.startswith(WORK) else name


def callers(frame: FrameType) -> list[str]:
    """Return the modules of the frames above this one, from the inside out."""
    found, caller = list[str](), frame.f_back
    while caller is not None:
        name = module_of(caller)
        found += [] if name is None else [name]
        caller = caller.f_back
    return found


@cache
def record() -> Recording:
    """Record the second request to a tiny model, because the first also fills caches."""
    recording = Recording()
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with TemporaryDirectory() as folder:
        save_model(Path(folder))
        llm = LLM.load(folder, weights="float32")
        llm.generate("abc", params)
        with recording.recorded():
            llm.generate("xyz", params)
    return recording


def save_model(folder: Path) -> None:
    """Save a random Llama of bytes."""
    shapes = expected_tensors(read_config(CONFIG))
    save_file({name: randn(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: token_id for token_id, token in enumerate([*letters, "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def drawing() -> str:
    """Return the way of a request as a Mermaid sequence diagram; its rooms are numbered."""
    recording = record()
    pairs = [pair for calls in recording.calls.values() for pair in calls]
    shown = dict.fromkeys(name for pair in pairs for name in pair)
    numbers = {name: f"{number} " for number, name in enumerate(recording.rooms, start=1)}
    lines = ["sequenceDiagram"]
    lines += [f"    participant {_id(each)} as {numbers.get(each, '')}{each}" for each in shown]
    for phase, title in PHASES.items():
        lines.append(f"    Note over llm: {title}")
        for (caller, called), functions in recording.calls[phase].items():
            named = [each for each in functions if each != "__init__"] or ["create"]
            more = ", ..." if len(named) > MOST_NAMED else ""
            names = ", ".join(named[:MOST_NAMED]) + more
            lines.append(f"    {_id(caller)}->>{_id(called)}: {names}")
    return "\n".join(lines) + "\n"


def _id(name: str) -> str:
    return name.replace(".", "_")


def main(arguments: SequenceOf[str]) -> None:
    """Print the drawing, or with `--write` put it into docs/architecture.md."""
    if "--write" not in arguments:
        sys.stdout.write(drawing())
        return
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(replaced(text, *MARKS, f"```mermaid\n{drawing()}```"), encoding="utf-8")
    print(f"written: {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1:])
