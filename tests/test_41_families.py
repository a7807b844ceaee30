"""Every family over real processes, in float32; the default model in bytes, and its memory."""

import os
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minigen import LLM, SamplingParams
from minigen.checkpoint.checkpoint import open_checkpoint
from minigen.kv_cache.paged import Batch, KVPool, attend_paged
from minigen.model.transformer import Transformer
from minigen.parallel.sharding import share_bytes
from minigen.protocols import Attend
from minigen_course.lab.inspect_model import agreement, read_along
from tests.panels import root_mean_square, unrounded
from tests.processes import own_bytes, workers_of
from tests.ranks import save_six_heads
from tests.tiny import TINY_VOCAB, VARIANTS, save_model, save_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = ["abc", "abcdefghij" * 3, "q"]
TEXTS = [list(range(5, 25)), list(range(40, 47)), [9] * 12]
TEXT = "The old keeper of the lighthouse climbed the stairs. " * 4


def sizes_for(variant: str) -> dict[str, Any]:
    """Return sizes with 8 query heads, which 4 ranks can share; two ranks share each KV head."""
    kv_heads = {"llama-mha": 8, "llama-mqa": 1}.get(variant, 2)
    return {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": kv_heads}


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_processes_together_give_the_logits_of_one(
    variant: str, num_ranks: int, tmp_path: Path
) -> None:
    save_model(tmp_path, variant, vocab_size=TINY_VOCAB, **sizes_for(variant))
    save_tokenizer(tmp_path)
    alone = LLM.load(tmp_path, weights="float32")
    with closing(LLM.load(tmp_path, weights="float32", tensor_parallel_size=num_ranks)) as split:
        found, expected = read_along(split, *TEXTS).logits, read_along(alone, *TEXTS).logits
        for mine, right in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, right, atol=1e-4, rtol=0)
        answers, right_ones = (
            llm.generate(PROMPTS, GREEDY, progress=False) for llm in (split, alone)
        )
        assert [each.token_ids for each in answers] == [each.token_ids for each in right_ones]


def by_layers(pool: KVPool, batch: Batch, windows: Any) -> Attend:
    """Attention passed as a custom function, so that the layers run one by one, as on a rank."""
    return attend_paged(pool, batch, windows)


def with_inputs_as_they_are(model: Transformer) -> Transformer:
    """Return the model with the same weights, multiplied in float32."""
    layers = tuple(
        replace(
            layer,
            qkv=unrounded(layer.qkv),
            out=unrounded(layer.out),
            gate_up=unrounded(layer.gate_up),
            down=unrounded(layer.down),
        )
        for layer in model.layers
    )
    return replace(model, layers=layers)


@pytest.mark.long
@pytest.mark.model
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_weights_in_codes_are_the_same_on_three_ranks(default_model_path: Path, form: str) -> None:
    """The weights are cut between groups that share a scale, so they are equal, but sums differ.

    Another order of sums moves inputs over the edge between two bytes, as if their rounding were
    drawn a second time. Two draws are the square root of 2 times as far apart as either is from
    inputs that are not rounded.
    """
    alone = LLM.load(default_model_path, weights=form, attention_backend=by_layers)
    ids = alone.tokenizer.encode(TEXT)
    of_one = read_along(alone, ids).logits
    runner: Any = alone.engine.runner
    runner.model = with_inputs_as_they_are(runner.model)
    exact = read_along(alone, ids).logits
    with closing(LLM.load(default_model_path, weights=form, tensor_parallel_size=3)) as split:
        found = read_along(split, ids).logits
    apart, rounding = (root_mean_square(a[0] - b[0]) for a, b in ((found, of_one), (of_one, exact)))
    line = f"{apart:.4f} apart, by rounding {rounding:.4f}"
    print(f"\n{form}: {line}; the same token {agreement(found, of_one):.1%}")
    assert 0 < rounding < root_mean_square(exact[0])
    assert apart < 2**0.5 * rounding, line


@pytest.mark.long
@pytest.mark.model
def test_bfloat16_on_three_ranks_is_as_near_to_float32_as_on_one(default_model_path: Path) -> None:
    """A sum over ranks rounds every part and every addition: 5 times, where one rank rounds once.

    That happens twice per layer. Six other results of a layer are rounded as on one rank: both
    norms, queries with keys and values, the mixture, gate with up, and their product. So the square
    of the error is at most (6 + 2 x 5) / (6 + 2) = 2 times as large.
    """
    exact, of_one = (
        LLM.load(default_model_path, weights=form, attention_backend=by_layers)
        for form in ("float32", "bfloat16")
    )
    ids = exact.tokenizer.encode(TEXT)
    with closing(LLM.load(default_model_path, weights="bfloat16", tensor_parallel_size=3)) as split:
        right, alone, found = (
            read_along(llm, ids).logits[0].float() for llm in (exact, of_one, split)
        )
    apart, rounding = root_mean_square(found - right), root_mean_square(alone - right)
    line = f"{apart:.4f} from float32, one rank {rounding:.4f}"
    print(f"\nbfloat16: {line}")
    assert 0 < apart < 2**0.5 * rounding, line


ALLOCATED = 8e6  # bytes that allocators hold, more in one process than in another

ALONE = """
import sys
from minigen import LLM, SamplingParams
llm = LLM.load(sys.argv[1], weights="float32", kv_cache_memory="24M", threads=1)
llm.generate("a", SamplingParams(max_tokens=4), progress=False)
print("loaded", flush=True)
sys.stdin.read()
"""


def bytes_of_one(path: Path) -> int:
    """Return the memory of a process that holds all of a model."""
    process = subprocess.Popen(
        [sys.executable, "-c", ALONE, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline()
        found = own_bytes(process.pid)
        process.kill()
    return found


def bytes_of_ranks(path: Path) -> list[int]:
    """Return the memory of each of ranks 1 and 2 of 3."""
    options: dict[str, Any] = {"kv_cache_memory": "24M", "threads": 3, "tensor_parallel_size": 3}
    with closing(LLM.load(path, weights="float32", **options)) as llm:
        llm.generate("a", SamplingParams(max_tokens=4), progress=False)
        return [own_bytes(worker) for worker in workers_of(os.getpid())]


@pytest.mark.long
@pytest.mark.model
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells")
def test_a_rank_of_three_has_a_third_of_the_memory_that_one_process_has(
    default_model_path: Path, tmp_path: Path
) -> None:
    """Without Python's and torch's own memory, known from a model of a few thousand numbers."""
    nothing = save_six_heads(tmp_path, 128)
    whole = bytes_of_one(default_model_path) - bytes_of_one(nothing)
    empty, full = bytes_of_ranks(nothing), bytes_of_ranks(default_model_path)
    checkpoint = open_checkpoint(default_model_path)
    repeated = share_bytes(checkpoint.tensors, checkpoint.config, 1, 3).repeated
    for before, after in zip(empty, full, strict=True):
        print(f"\na rank holds {(after - before) / 1e6:.0f} MB, one alone {whole / 1e6:.0f} MB")
        assert after - before <= whole / 3 + repeated + ALLOCATED
