"""Linear layers by oneDNN, packed or plain: the same products, for any number of rows."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minigen import LLM, SamplingParams
from minigen.kernels import onednn
from minigen.kernels.onednn import PackedLinear, PlainLinear, can_pack, is_faster, pack, plain
from minigen.model.layers import DenseLinear

packs = pytest.mark.skipif(
    not can_pack(torch.bfloat16), reason="torch has no oneDNN for bfloat16 on this machine"
)
has_both = pytest.mark.skipif(
    not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()),
    reason="torch has no MKL or no oneDNN on this machine",
)
all_rows = pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 9, 33, 300])
all_shapes = pytest.mark.parametrize(("outs", "ins"), [((16,), 8), ((48, 16, 16), 40), ((99,), 65)])
with_bias = pytest.mark.parametrize("has_bias", [False, True])


def linear_and_inputs(
    dtype: torch.dtype, rows: int, outs: tuple[int, ...], ins: int, has_bias: bool
) -> tuple[DenseLinear, torch.Tensor]:
    """Return a random linear layer, and rows that are twice as wide as its inputs."""
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(sum(outs), ins, generator=generator).to(dtype)
    bias = torch.randn(sum(outs), generator=generator).to(dtype) if has_bias else None
    wide = torch.randn(rows, 2 * ins, generator=generator).to(dtype)
    return DenseLinear(weight, bias, outs), wide


@packs
@all_rows
@all_shapes
@with_bias
def test_a_packed_linear_gives_what_the_plain_one_gives(
    rows: int, outs: tuple[int, ...], ins: int, has_bias: bool
) -> None:
    by_torch, wide = linear_and_inputs(torch.bfloat16, rows, outs, ins, has_bias)
    packed, x = pack(by_torch), wide[:, :ins].contiguous()
    assert packed.parts == outs
    torch.testing.assert_close(packed(x), by_torch(x), rtol=1e-2, atol=1e-2)


@has_both
@all_rows
@all_shapes
@with_bias
def test_onednn_gives_what_torch_gives_on_the_same_weights(
    rows: int, outs: tuple[int, ...], ins: int, has_bias: bool
) -> None:
    by_torch, whole = linear_and_inputs(torch.float32, rows, outs, ins, has_bias)
    by_onednn = plain(by_torch)
    assert isinstance(by_onednn, PlainLinear)
    assert by_onednn.weight is by_torch.weight
    for x in (whole[:, :ins].contiguous(), whole[:, ins : 2 * ins]):  # a view of wider rows too
        torch.testing.assert_close(by_onednn(x), by_torch(x), rtol=1e-5, atol=1e-5)


def test_only_bfloat16_is_packed() -> None:
    assert not can_pack(torch.float32)


@has_both
def test_float32_goes_to_onednn_on_the_processors_on_which_mkl_is_slow(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = ["a", "some longer prompt than that", "zz"]
    found, by = [], {"AMD EPYC 9R14": "torch, by oneDNN", "Intel(R) Xeon(R)": "torch"}
    for name, expected in by.items():
        monkeypatch.setattr(onednn, "cpu_name", lambda name=name: name)
        assert is_faster(torch.float32) == name.startswith("AMD")
        assert not is_faster(torch.bfloat16)
        llm = LLM.load(tiny_directory, weights="float32")
        assert llm.describe()["linear"] == expected
        model = llm.engine.runner.model  # type: ignore[attr-defined]
        linears = [model.head, *(layer.down for layer in model.layers)]
        assert all(isinstance(each, PlainLinear) == name.startswith("AMD") for each in linears)
        found.append([each.token_ids for each in llm.generate(prompts, greedy)])
    assert found[0] == found[1]


@packs
def test_the_engine_packs_bfloat16_weights_and_says_so(tiny_directory: Path) -> None:
    llm = LLM.load(tiny_directory, weights="bfloat16")
    assert "packed" in llm.describe()["linear"]
    model = llm.engine.runner.model  # type: ignore[attr-defined]
    assert isinstance(model.head, PackedLinear)
    assert all(isinstance(layer.down, PackedLinear) for layer in model.layers)


@packs
def test_packed_weights_choose_the_tokens_of_plain_ones(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = ["a", "some longer prompt than that", "zz"]
    packed = LLM.load(tiny_directory, weights="bfloat16").generate(prompts, greedy)
    monkeypatch.setattr("minigen.kernels.onednn.can_pack", lambda dtype: False)
    plain = LLM.load(tiny_directory, weights="bfloat16").generate(prompts, greedy)
    assert [each.token_ids for each in packed] == [each.token_ids for each in plain]


@packs
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the variable is x86's")
def test_weights_stay_plain_where_onednn_packs_no_bfloat16(tiny_directory: Path) -> None:
    code = (
        "import sys; from minigen import LLM\n"
        "llm = LLM.load(sys.argv[1], weights='bfloat16')\n"
        "print(llm.describe()['linear'], len(llm.generate('abc').token_ids) > 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_directory)],
        capture_output=True,
        encoding="utf-8",
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"},  # an x86 processor without AVX-512
    )
    assert done.stderr == ""
    assert done.stdout == "torch True\n"
