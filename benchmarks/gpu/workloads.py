"""The engine against plain torch, against the bandwidth, and against transformers."""

import random
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.engines import (
    BLOCK_SIZE,
    CUDA,
    LLAMA_3_8B,
    QWEN3_0_6B,
    Shape,
    bytes_a_token,
    greedy,
    make_engine,
    random_model,
    run,
)
from minigen.kernels.triton.kernel_model import KernelModel
from minigen.kv_cache.block_allocator import blocks_needed
from minigen.model.attention import attend_packed
from minigen.model.transformer import Transformer
from minigen.sequence import Sequence

MOST_MARGIN = 0.5  # rounding gives a tenth of it; a wrong token is 3 or more below


def margins(
    model: KernelModel, shape: Shape, prompt_lengths: tuple[int, ...], max_num_batched_tokens: int
) -> Tensor:
    """Return how far below one plain pass's likeliest token each chosen token is, in logits.

    Prompts run in chunks of `max_num_batched_tokens`, together with decodes of other sequences, and
    each answer is longer than the one before. Logits have a standard deviation of about 1.
    """
    longest = max(prompt_lengths) + 4 * len(prompt_lengths)
    num_blocks = len(prompt_lengths) * blocks_needed(longest, BLOCK_SIZE)
    engine = make_engine(
        model,
        shape,
        longest,
        len(prompt_lengths),
        num_blocks,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    rng = random.Random(1)
    sequences = [
        greedy(i, [rng.randrange(shape.vocab) for _ in range(length)], 4 * (i + 1))
        for i, length in enumerate(prompt_lengths)
    ]
    run(engine, sequences)
    return below_likeliest(model.model, sequences, [None] * shape.layers)


@torch.inference_mode()
def below_likeliest(
    model: Transformer, sequences: list[Sequence], windows: SequenceOf[int | None]
) -> Tensor:
    """Return how far each answer token is below the likeliest of one plain pass, in logits."""
    device, found = model.embedding.device, []
    for sequence in sequences:
        ids = torch.tensor(sequence.token_ids[:-1], device=device)
        attend = attend_packed([len(ids)], windows)
        with device:  # masks are created there
            hidden = model(ids, torch.arange(len(ids)), attend)
        logits = model.logits(hidden[-len(sequence.output_ids) :])
        chosen = torch.tensor(sequence.output_ids, device=device).unsqueeze(-1)
        found.append(logits.amax(-1) - logits.gather(-1, chosen).squeeze(-1))
    return torch.cat(found)


def agreement() -> dict[str, Any]:
    """Compare the engine's tokens, prefilled, chunked and replayed, with one plain pass per text.

    Raises `AssertionError` for a token that rounding cannot explain.
    """
    shape = replace(QWEN3_0_6B, layers=4, vocab=5000)
    lengths = (1, 15, 16, 17, 300, 1111)
    margin = margins(random_model(shape, 2048), shape, lengths, max_num_batched_tokens=256)
    worst, equal = float(margin.max()), float((margin == 0).float().mean())
    if not worst < MOST_MARGIN:
        raise AssertionError(f"a token is {worst:.3g} below the likeliest; {equal:.0%} are equal")
    return {"worst_margin": worst, "equal": equal}


def one_stream(bandwidth: float | None) -> dict[str, Any]:
    """Time the decode of one sequence in Llama-3-8B's shape, with the limit of the bandwidth."""
    model = random_model(LLAMA_3_8B, 1024)
    engine = make_engine(model, LLAMA_3_8B, 1024, 1, 80)
    prompt = [each % 1000 for each in range(128)]
    run(engine, [greedy(0, prompt, 16)])
    sequence = greedy(1, prompt, 400)
    engine.add(sequence)
    while len(sequence.output_ids) < 2:
        engine.step()
    done, started = len(sequence.output_ids), time.perf_counter()
    run(engine, [])
    spent = (time.perf_counter() - started) / (400 - done)
    limit = bandwidth / bytes_a_token(model) if bandwidth else None
    return {
        "tokens_a_second": 1 / spent,
        "limit": limit,
        "of_limit": 1 / spent / limit if limit else None,
    }


def requests(count: int) -> list[tuple[list[int], int]]:
    """Return prompts of 100 to 1,024 tokens, each with its answer length, drawn the same way."""
    rng = random.Random(0)
    return [
        ([rng.randrange(10_000) for _ in range(rng.randint(100, 1024))], rng.randint(100, 1024))
        for _ in range(count)
    ]


def many_streams(count: int = 256) -> dict[str, Any]:
    """Run the usual workload on Qwen3-0.6B's shape, all requests at once."""
    shape = QWEN3_0_6B
    model = random_model(shape, 2048)
    engine = make_engine(model, shape, 2048, count, _num_blocks(shape, count * 1500))
    for length in (200, 40):  # both kinds of prompts are compiled before the clock starts
        run(engine, [greedy(-length, [1] * length, 20)])
    sequences = [greedy(i, *each) for i, each in enumerate(requests(count))]
    started = time.perf_counter()
    run(engine, sequences)
    spent = time.perf_counter() - started
    made = sum(len(each.output_ids) for each in sequences)
    return {"seconds": spent, "output_tokens": made, "output_tokens_a_second": made / spent}


def _num_blocks(shape: Shape, num_tokens: int) -> int:
    """Return the blocks for `num_tokens` tokens, or for as many as fit into the device's memory."""
    a_block = 2 * shape.layers * BLOCK_SIZE * shape.kv_heads * shape.head_dim * 2
    free, _ = torch.cuda.mem_get_info()
    return min(num_tokens // BLOCK_SIZE, int(0.8 * free) // a_block)


def where_time_goes(shape: Shape, count: int, context: int, steps: int = 10) -> dict[str, Any]:
    """Return the device milliseconds of decode steps, kernel by kernel.

    `idle` is the rest of a step by the clock, here including the profiler's own cost.
    """
    answer = 4 * steps
    num_blocks = count * blocks_needed(context + answer, BLOCK_SIZE)
    engine = make_engine(random_model(shape, 2048), shape, 2048, count, num_blocks)
    sequences = [greedy(i, [i + 1] * context, answer) for i in range(count)]
    for sequence in sequences:
        engine.add(sequence)
    while len(sequences[-1].output_ids) < 3:
        engine.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        started = time.perf_counter()
        for _ in range(steps):
            engine.step()
        spent = time.perf_counter() - started
    kernels = sorted(profile.key_averages(), key=lambda each: -each.self_device_time_total)
    busy = sum(each.self_device_time_total for each in kernels) / 1e6
    return {
        "step": 1e3 * spent / steps,
        "idle": 1e3 * (spent - busy) / steps,
        "kernels": {
            each.key[:80]: {
                "milliseconds": each.self_device_time_total / 1e3 / steps,
                "launches": each.count / steps,
            }
            for each in kernels[:16]
        },
    }


# torch prefers cuDNN's attention on Hopper, which plans for each length, 30 ms or more. With a
# static cache the length is always the same.
UNPLANNED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
WARM_UP = 32  # tokens


def transformers_streams(batch: int, most_tokens: int, compiled: bool = False) -> dict[str, Any]:
    """Run the first `batch` of the same requests with `generate`, padded left.

    Answers are cut at `most_tokens`. It is a static batch: all rows run until the longest ends, and
    only wanted tokens count. `compiled` has a static cache, for which transformers compiles the
    model; this is done before the clock starts.
    """
    if find_spec("transformers") is None:
        return {"left out": "transformers is not installed"}
    from transformers import Qwen3Config, Qwen3ForCausalLM, __version__

    shape = QWEN3_0_6B
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.q_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    chosen = [(prompt, min(wanted, most_tokens)) for prompt, wanted in requests(batch)]
    width, steps = max(len(prompt) for prompt, _ in chosen), max(each for _, each in chosen)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in chosen], device=CUDA)
    mask = torch.tensor(
        [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in chosen], device=CUDA
    )
    settings: dict[str, Any] = {"do_sample": False, "attention_mask": mask}
    if compiled:
        settings["cache_implementation"] = "static"

    def generate(**limits: float) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        model.generate(ids, **settings, **limits)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    whole = {"max_new_tokens": steps, "min_new_tokens": steps}
    if compiled:
        for _ in range(2):  # it is compiled, and then captured; a second of each text will do
            generate(**whole, max_time=1.0)
        spent = generate(**whole)
    else:
        with sdpa_kernel(UNPLANNED):
            generate(max_new_tokens=WARM_UP, min_new_tokens=WARM_UP)
            spent = generate(**whole)
    torch.compiler.reset()
    made = sum(each for _, each in chosen)
    return {
        "transformers": __version__,
        "batch": batch,
        "compiled": compiled,
        "seconds": spent,
        "output_tokens_a_second": made / spent,
    }


def against_transformers(ours: dict[str, Any], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return our output tokens per second relative to each way in which transformers ran.

    `ratio` is to the fastest that is not compiled.
    """
    mine = ours.get("output_tokens_a_second")
    found = {
        (each["compiled"], each["batch"]): each["output_tokens_a_second"]
        for each in theirs
        if "batch" in each
    }
    plain = [rate for (compiled, _), rate in found.items() if not compiled]
    if mine is None or not plain:
        return {"left out": "there is nothing to compare"}
    ratios = {
        f"to a {'compiled ' if compiled else ''}batch of {batch}": mine / rate
        for (compiled, batch), rate in found.items()
    }
    return {"ratio": mine / max(plain), **ratios}
