"""The engine beside plain torch, beside the bandwidth, and beside transformers."""

import random
import time
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu.engines import (
    CUDA,
    LLAMA_3_8B,
    QWEN3_0_6B,
    bytes_a_token,
    greedy,
    make_engine,
    random_model,
    run,
)
from minigen.model.attention import attend_packed
from minigen.sequence import Sequence


@torch.inference_mode()
def agreement() -> dict[str, Any]:
    """Tokens of the engine, prefilled, chunked and replayed, beside one plain pass over each text.

    `worst_margin`: by how many logits the chosen token was below the likeliest of the plain pass,
    whose logits have a standard deviation of about 1.
    """
    shape = replace(QWEN3_0_6B, layers=4, vocab=5000)
    model = random_model(shape, 2048)
    engine = make_engine(model, shape, 2048, 8, 2000)
    rng, margins = random.Random(1), []
    lengths = (1, 15, 16, 17, 300, 1111)
    prompts = [[rng.randrange(5000) for _ in range(length)] for length in lengths]
    sequences = [greedy(i, prompt, 40) for i, prompt in enumerate(prompts)]
    run(engine, sequences)
    for sequence in sequences:
        ids = torch.tensor(sequence.token_ids[:-1], device=CUDA)
        attend = attend_packed([len(ids)], [None] * shape.layers)
        hidden = model.model(ids, torch.arange(len(ids), device=CUDA), attend)
        logits = model.model.logits(hidden[-40:])
        chosen = torch.tensor(sequence.output_ids, device=CUDA).unsqueeze(-1)
        margins.append(logits.amax(-1) - logits.gather(-1, chosen).squeeze(-1))
    margin = torch.cat(margins)
    return {"worst_margin": float(margin.max()), "equal": float((margin == 0).float().mean())}


def one_stream(bandwidth: float) -> dict[str, Any]:
    """Decode of one sequence, Llama-3-8B's shape: tokens a second, and what the bytes allow."""
    model = random_model(LLAMA_3_8B, 1024)
    engine = make_engine(model, LLAMA_3_8B, 1024, 1, 80)
    prompt = [each % 1000 for each in range(128)]
    run(engine, [greedy(0, prompt, 16)])
    sequence = greedy(1, prompt, 400)
    engine.add(sequence)
    while len(sequence.output_ids) < 2:
        engine.step()
    torch.cuda.synchronize()
    done, begun = len(sequence.output_ids), time.perf_counter()
    while engine.has_work():
        engine.step()
    rate = (400 - done) / (time.perf_counter() - begun)
    limit = bandwidth / bytes_a_token(model)
    return {"tokens_a_second": rate, "limit": limit, "of_limit": rate / limit}


def requests(count: int) -> list[tuple[list[int], int]]:
    """Prompts of 100 to 1,024 tokens, each with how many are to come, as many again."""
    rng = random.Random(0)
    return [
        ([rng.randrange(10_000) for _ in range(rng.randint(100, 1024))], rng.randint(100, 1024))
        for _ in range(count)
    ]


def many_streams(count: int = 256) -> dict[str, Any]:
    """The customary workload on Qwen3-0.6B's shape, all requests at once."""
    model = random_model(QWEN3_0_6B, 2048)
    engine = make_engine(model, QWEN3_0_6B, 2048, count, count * 1500 // 16)
    run(engine, [greedy(-1, [1] * 200, 20)])
    sequences = [greedy(i, *each) for i, each in enumerate(requests(count))]
    begun = time.perf_counter()
    run(engine, sequences)
    spent = time.perf_counter() - begun
    return {"seconds": spent, **_rates(sequences, spent)}


def _rates(sequences: list[Sequence], spent: float) -> dict[str, float]:
    made = sum(len(each.output_ids) for each in sequences)
    return {"output_tokens": made, "output_tokens_a_second": made / spent}


def transformers_streams(batch: int, most_tokens: int) -> dict[str, Any]:
    """The first `batch` of the same requests by `generate`, padded left, cut at `most_tokens`.

    A static batch: all go on to the longest, and only wanted tokens count.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

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
    model.generate(ids, max_new_tokens=4, min_new_tokens=4, **settings)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    model.generate(ids, max_new_tokens=steps, min_new_tokens=steps, **settings)
    torch.cuda.synchronize()
    spent = time.perf_counter() - begun
    made = sum(each for _, each in chosen)
    return {"batch": batch, "seconds": spent, "output_tokens_a_second": made / spent}
