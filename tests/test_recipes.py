"""The recipes of CONTRIBUTING.md, each shown by a small real example."""

import json
from pathlib import Path

import pytest
import torch
from transformers import SeedOssConfig, SeedOssForCausalLM

from minigen import LLM, SamplingParams
from minigen.checkpoint import config_json
from minigen.checkpoint.config_json import Family
from tests import tiny

WITHOUT_MEANING = frozenset({"attention_out_bias", "residual_dropout"})


def test_a_family_with_llamas_layers_is_one_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    sizes = {**tiny.SIZES, "vocab_size": tiny.TINY_VOCAB, "head_dim": 12}
    theirs = SeedOssForCausalLM(SeedOssConfig(**sizes)).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.normal_(float(name.endswith("norm.weight")), 0.3)
    theirs.save_pretrained(tmp_path)
    tiny.save_tokenizer(tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    assert raw.pop("attention_bias")  # of queries, keys and values alone: the family says so
    path.write_text(json.dumps(raw), encoding="utf-8")

    monkeypatch.setitem(config_json.FAMILIES, "seed_oss", Family(qkv_bias=True))
    ignored = config_json._MEANINGLESS_KEYS | WITHOUT_MEANING
    monkeypatch.setattr(config_json, "_MEANINGLESS_KEYS", ignored)
    llm = LLM.load(tmp_path, weights="float32", num_blocks=8)
    prompt = [5, 80, 33, 120, 7]
    found = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    expected = theirs.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=20, eos_token_id=None
    )
    assert found.token_ids == expected[0, len(prompt) :].tolist()
    assert len(set(found.token_ids)) > 5  # a text that a wrong layer would change
