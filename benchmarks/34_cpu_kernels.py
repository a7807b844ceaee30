"""Formats of weights side by side: what they cost in quality, and what they gain in speed.

Quality is measured against float32 in two ways. On a fixed English text (the topics of Python's own
manual, which every Python includes): how often the likeliest next token is the same, and
perplexity. On questions whose first five answer tokens float32 is sure of (a lead of one logit or
more): how many of those tokens a format also gives when it answers freely and greedily, up to the
first difference. Speed is a ratio to torch's layers in bfloat16, by turns in one run. Keys and
values are bfloat16, except in the format that has an int8 cache. The gain of that cache with long
contexts is a ratio to the same weights with a cache in bfloat16.
"""

import hashlib
import json
import math
import pydoc_data.topics
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import json_option, random_prompts, write_results
from questions import candidates
from rich.progress import track
from step_timing import decode_seconds, fill_cache
from sure import by_family, keeping, sure_ones

from minigen import LLM, SamplingParams
from minigen.engine.model_runner import Packed, PagedRunner
from minigen.hardware import torch_threads
from minigen.kernels.cpu.compile import compile_step
from minigen.kernels.cpu.runner import CompiledRunner
from minigen.kv_cache.paged import attend_paged
from minigen.model.attention import attend_packed

INT4_IN_BYTES = "int4 with an int8 cache"
FORMS: dict[str, dict[str, str]] = {
    "bfloat16": {"weights": "bfloat16"},
    "int8": {"weights": "int8"},
    "int4": {"weights": "int4"},
    INT4_IN_BYTES: {"weights": "int4", "kv_cache_dtype": "int8"},
}
CONTEXTS = ((1, 4096), (16, 2048))  # number of sequences, and tokens per sequence
BLOCK_SIZE = 16
WINDOW, NUM_WINDOWS = 512, 40
TURNS = 5


def text_ids(llm: LLM) -> list[int]:
    """Return the first tokens of the fixed text."""
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return llm.tokenizer.encode(text[: 8 * WINDOW * NUM_WINDOWS])[: WINDOW * NUM_WINDOWS]


def all_logits(llm: LLM, ids: list[int]) -> torch.Tensor:
    """Return the logits after every token of a window."""
    runner: Any = llm.engine.runner
    count = len(ids)
    if isinstance(runner, CompiledRunner):
        every = np.arange(count)
        tables = np.arange(1, 2 + count // 16).reshape(1, -1)
        starts, lengths = np.array([0, count]), np.array([count])
        packed = Packed(np.array(ids), every, 16 + every, starts, lengths, tables, every)
        logits = np.empty(count * runner.shape.vocab, np.float32)
        runner.run(packed, logits)
        return torch.from_numpy(logits).unflatten(0, (count, -1))
    with torch.inference_mode():
        attend = attend_packed([count], llm.config.sliding_windows)
        model = runner.model
        hidden = model(torch.tensor(ids), torch.arange(count), attend)
        return model.logits(hidden)


def read_text(llm: LLM, ids: list[int]) -> tuple[np.ndarray, float]:
    """Return the likeliest token after each token of the text, and the perplexity."""
    likeliest, lost = [], 0.0
    for start in track(range(0, len(ids), WINDOW), "reading"):
        window = ids[start : start + WINDOW]
        logits = all_logits(llm, window)
        likeliest.append(logits.argmax(dim=-1).numpy())
        logprobs = logits[:-1].log_softmax(dim=-1)
        lost -= float(logprobs.gather(-1, torch.tensor(window[1:]).unsqueeze(-1)).sum())
    return np.concatenate(likeliest), math.exp(lost / (len(ids) * (WINDOW - 1) / WINDOW))


def measure_quality(load: Callable[..., LLM]) -> dict[str, Any]:
    exact = load(weights="float32")
    ids = text_ids(exact)
    expected, perplexity = read_text(exact, ids)
    asked = candidates()
    sure = sure_ones(exact, asked)
    digest = hashlib.sha256(np.array(ids, np.int64).tobytes()).hexdigest()
    found: dict[str, Any] = {
        "tokens": len(ids),
        "sha256 of the token ids": digest,
        "candidate questions": len(asked),
        "sure questions": len(sure),
        "sure by family": by_family(sure),
        "float32 perplexity": perplexity,
    }
    for form, options in FORMS.items():
        llm = load(**options)
        assert isinstance(llm.engine.runner, CompiledRunner)
        likeliest, own = read_text(llm, ids)
        found[form] = {
            "top-1 agreement": float((likeliest == expected).mean()),
            "perplexity ratio": own / perplexity,
            "sure tokens": keeping(llm, sure),
        }
        print(form, json.dumps(found[form]), flush=True)
    return found


def rates(llm: LLM, turn: int) -> dict[str, float]:
    """Return tokens per second: one stream, prompts of 512 and 1,024, and 32 requests (64 + 64)."""
    params = SamplingParams(temperature=0, max_tokens=65, ignore_eos=True)
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    seconds = {}

    def timed(name: str, prompts: list[list[int]], asked: SamplingParams) -> None:
        start = time.perf_counter()
        llm.generate(prompts, asked, progress=False)
        seconds[name] = time.perf_counter() - start

    (short,) = random_prompts(1, 64, 10 * turn)
    timed("first", [short], one)
    timed("stream", [[7, *short[1:]]], params)
    for length in (512, 1024):
        timed(f"prefill {length}", random_prompts(1, length, 10 * turn + length), one)
    timed("together", random_prompts(32, 64, 10 * turn + 1), params)
    return {
        "decode": 64 / (seconds["stream"] - seconds["first"]),
        "prefill 512": 512 / seconds["prefill 512"],
        "prefill 1024": 1024 / seconds["prefill 1024"],
        "32 together": 32 * 65 / seconds["together"],
    }


def measure_speed(load: Callable[..., LLM]) -> dict[str, Any]:
    engines = {"bfloat16, layer by layer": load(weights="bfloat16", attention_backend=layers)}
    assert isinstance(engines["bfloat16, layer by layer"].engine.runner, PagedRunner)
    engines |= {form: load(**options) for form, options in FORMS.items()}
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for turn in track(range(TURNS + 1), "speed, by turns"):
        for name, llm in engines.items():
            torch.set_num_threads(torch_threads())  # the kernels left torch one
            found = rates(llm, turn)
            if turn:
                taken[name].append(found)
    base = taken["bfloat16, layer by layer"]
    return {
        name: {
            load_name: {
                "tokens a second": statistics.median(turn[load_name] for turn in turns),
                "ratio": statistics.median(
                    turn[load_name] / other[load_name]
                    for turn, other in zip(turns, base, strict=True)
                ),
            }
            for load_name in turns[0]
        }
        for name, turns in taken.items()
    }


def measure_contexts() -> dict[str, Any]:
    """Return milliseconds of a decode step with long contexts, by cache format, by turns."""
    engines = {
        form: LLM.load(
            **FORMS[form],
            max_num_seqs=max(sequences for sequences, _ in CONTEXTS),
            block_size=BLOCK_SIZE,
            num_blocks=max(sequences * context for sequences, context in CONTEXTS) // BLOCK_SIZE,
            enable_prefix_caching=False,
        )
        for form in ("int4", INT4_IN_BYTES)
    }
    for llm in engines.values():
        fill_cache(llm)
    found = {}
    for sequences, context in CONTEXTS:
        turns = [
            {form: decode_seconds(llm, sequences, context) for form, llm in engines.items()}
            for _ in track(range(TURNS), f"{sequences} x {context:,}")
        ]
        found[f"{sequences} x {context}"] = {
            form: {
                "ms": 1e3 * statistics.median(turn[form] for turn in turns),
                "ratio": statistics.median(turn["int4"] / turn[form] for turn in turns),
            }
            for form in engines
        }
    return found


def layers(pool: Any, batch: Any, windows: Any) -> Any:
    """Call minigen's attention in torch; as a custom function it makes layers run one by one."""
    return attend_paged(pool, batch, windows)


def main() -> None:
    file = json_option()
    for options in FORMS.values():  # compiling is not measured
        compile_step(options["weights"], options.get("kv_cache_dtype", "bfloat16"))

    def load(**options: Any) -> LLM:
        return LLM.load(max_num_seqs=32, **options)

    results = {
        "quality": measure_quality(load),
        "speed": measure_speed(load),
        "decode with long contexts": measure_contexts(),
    }
    print(json.dumps(results, indent=2))
    if file is not None:
        write_results(file, results)


if __name__ == "__main__":
    main()
