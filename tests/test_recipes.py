"""The recipes of CONTRIBUTING.md, each shown by a small real example."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import SeedOssConfig, SeedOssForCausalLM

from minigen import LLM, SamplingParams
from minigen.checkpoint import config_json
from minigen.checkpoint.config_json import Family
from tests import tiny
from tests.recipe.chapter import FILES as CHAPTER
from tools.chapters import ROOT

HOLD_THE_ORDER = [
    f"tests/test_{name}.py"
    for name in ("notebooks", "course_arc", "exercises", "exercise_sheets", "layout")
]
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


def test_a_chapter_is_five_files(tmp_path: Path) -> None:
    """The tools write the rest: the card, the stub, the executed notebook."""
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, encoding="utf-8", check=True
    )
    for name in filter(None, tracked.stdout.split("\0")):
        if (ROOT / name).exists():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    assert len(CHAPTER) == 5
    for name, text in CHAPTER.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        with (tmp_path / name).open("a", encoding="utf-8") as file:
            file.write(text)
    for command in (
        ["tools.chapters", "--write"],
        ["tools.notebooks", "18"],
        ["tools.exercise_sheets"],
        ["pytest", "-q", "-p", "no:cacheprovider", *HOLD_THE_ORDER, "-k", "18"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            encoding="utf-8",
        )
        assert done.returncode == 0, done.stdout + done.stderr
    held = re.search(r"(\d+) passed", done.stdout)
    assert held is not None
    assert int(held[1]) > 25, done.stdout
