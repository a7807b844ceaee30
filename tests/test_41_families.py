"""Every family over real processes, in float32; and the default model in 4 bits."""

from pathlib import Path
from typing import Any

import pytest
import torch

from minigen import LLM, SamplingParams
from minigen.teach.reading import agreement, read_along
from tests.tiny import TINY_VOCAB, VARIANTS, save_model, save_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = ["abc", "abcdefghij" * 3, "q"]
TEXTS = [list(range(5, 25)), list(range(40, 47)), [9] * 12]


def sizes_for(variant: str) -> dict[str, Any]:
    """8 query heads, which 4 ranks can share; of 2 KV heads each is then on two of them."""
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
    split = LLM.load(tmp_path, weights="float32", tensor_parallel=num_ranks)
    try:
        found, expected = read_along(split, *TEXTS).logits, read_along(alone, *TEXTS).logits
        for mine, right in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, right, atol=1e-4, rtol=0)
        answers, right_ones = (
            llm.generate(PROMPTS, GREEDY, progress=False) for llm in (split, alone)
        )
        assert [each.token_ids for each in answers] == [each.token_ids for each in right_ones]
    finally:
        split.close()


@pytest.mark.long
@pytest.mark.model
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_rounded_weights_are_the_same_on_three_ranks(default_model_path: Path, form: str) -> None:
    """Cut between groups that share a scale, they are the same numbers; sums round otherwise."""
    alone = LLM.load(default_model_path, weights=form)
    ids = alone.tokenizer.encode("The old keeper of the lighthouse climbed the stairs. " * 4)
    expected = read_along(alone, ids).logits
    split = LLM.load(default_model_path, weights=form, tensor_parallel=3)
    try:
        found = read_along(split, ids).logits
    finally:
        split.close()
    similar = torch.nn.functional.cosine_similarity(found[0], expected[0], dim=-1)
    print(f"\n{form}: agreement {agreement(found, expected):.3f}, least cosine {similar.min():.5f}")
    assert similar.min() > 0.995
    assert agreement(found, expected) > 0.95
