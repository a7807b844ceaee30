"""What a KV cache in fewer bits costs in quality, and what it saves.

- caches: the default model reads windows of a text with each `kv_cache_dtype`, and is compared with
  the same model, in float32, whose cache is in float32: KL divergence, same top token, perplexity.
  Each is given with the bytes of a token, from the pool that the engine reserves.
- axes: the relative error of real keys and values in groups of 32, if a group is one channel of 32
  tokens, or 32 channels of one token. KIVI (Liu et al. 2024) takes the first for keys, the second
  for values.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
import torch
from common import write_results
from quantized_quality import split_texts
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from minigen import LLM
from minigen.bench.perplexity import EngineRows, score, summarize_scores, windows_of
from minigen.checkpoint.checkpoint import open_checkpoint
from minigen.hub import DEFAULT_MODEL, resolve
from minigen.kv_cache.quantized import GROUP, dequantize, quantize
from minigen.model.attention import attend_packed
from minigen.model.transformer import build_transformer
from minigen.quantization.calibration import replaced_linear
from minigen.quantization.grid import relative_error

CACHES = ("fp8", "int8", "int4", "int2")
CONTEXT, BLOCK_SIZE, REFERENCE = 1024, 32, "auto"  # which is float32 beside such weights


def load(kv_cache_dtype: str) -> LLM:
    """Return the default model in float32, with this cache, for one window at a time."""
    return LLM.load(
        DEFAULT_MODEL,
        weights="float32",
        kv_cache_dtype=kv_cache_dtype,
        block_size=BLOCK_SIZE,
        num_blocks=CONTEXT // BLOCK_SIZE,
        max_num_seqs=1,
        max_num_batched_tokens=CONTEXT,
        enable_prefix_caching=False,
    )


def measure_caches(num_windows: int) -> dict[str, Any]:
    """Compare the model with each cache with the one whose cache is in float32."""
    reference = load(REFERENCE)
    token_ids = reference.tokenizer.encode(split_texts()[1], add_special_tokens=False)
    windows = windows_of(len(token_ids), CONTEXT, CONTEXT // 2, bos=False)
    windows = [windows[i * len(windows) // num_windows] for i in range(num_windows)]
    found: dict[str, Any] = {"float32": {"bytes per token": bytes_per_token(reference)}}
    for name in CACHES:
        llm = load(name)
        with Progress(console=Console(stderr=True)) as bars:
            task = bars.add_task(name, total=len(windows))
            scores = score(
                EngineRows(llm),
                EngineRows(reference),
                token_ids,
                windows,
                None,
                on_window=lambda _, bars=bars, task=task: bars.advance(task),
            )
        result = summarize_scores(scores)
        found[name] = {
            "bytes per token": bytes_per_token(llm),
            **asdict(result),
        }
        print(name, found[name], flush=True)
        llm.close()
    return found


def bytes_per_token(llm: LLM) -> int:
    """Return the bytes of a token's keys and values in all layers, scales included."""
    with llm.count_work() as counters:
        return counters.kv_bytes * llm.config.num_layers


def keys_and_values(token_ids: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Return each layer's rotated keys and values of a text: [tokens, heads, head size] each."""
    checkpoint = open_checkpoint(resolve(DEFAULT_MODEL))
    kept: list[tuple[Tensor, Tensor]] = []
    attend = attend_packed([len(token_ids)], checkpoint.config.sliding_windows)

    def watch(layer_id: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept.append((k, v))
        return attend(layer_id, q, k, v)

    model = build_transformer(
        checkpoint.config, checkpoint.tensors, torch.float32, replaced_linear({})
    )
    with torch.inference_mode():
        model(torch.tensor(token_ids), torch.arange(len(token_ids)), watch)
    return kept


def measure_axes(num_tokens: int = 512) -> dict[str, Any]:
    """Return the mean relative error over layers of both axes, for keys and values, by bits."""
    tokenizer = open_checkpoint(resolve(DEFAULT_MODEL)).tokenizer()
    token_ids = tokenizer.encode(split_texts()[1], add_special_tokens=False)[:num_tokens]
    pairs = keys_and_values(token_ids)
    found: dict[str, Any] = {}
    for place, name in enumerate(("keys", "values")):
        kept = [pair[place] for pair in pairs]
        spread = [each.abs().mean(0).flatten() for each in kept]  # by channel
        found[name] = {
            "largest channel / median channel": [
                float(each.max() / each.median()) for each in spread
            ]
        }
        for bits in (8, 4, 2):
            found[name][f"{bits} bits"] = {
                "per channel": mean(error(each, 0, bits) for each in kept),
                "per token": mean(error(each, 2, bits) for each in kept),
            }
        print(name, found[name], flush=True)
    return found


def error(x: Tensor, dim: int, bits: int) -> float:
    """Return the relative error of x, [tokens, heads, head size], with groups along `dim`."""
    groups = x.unflatten(dim, (-1, GROUP))
    rounded = dequantize(*quantize(groups, dim + 1, bits)).view_as(x)
    return relative_error(x.flatten(1), rounded.flatten(1))


def main() -> None:
    """Measure, print, and write JSON if a file was given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    parser.add_argument("--windows", type=int, default=12, help="windows of 1,024 tokens")
    options = parser.parse_args()
    results = {"axes": measure_axes(), "caches": measure_caches(options.windows)}
    if options.json is not None:
        write_results(options.json, {**results, "load": psutil.getloadavg()[0]})


if __name__ == "__main__":
    main()
