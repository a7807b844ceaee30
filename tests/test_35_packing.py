"""Codes of quantised checkpoints go into the packed forms of the CPU kernels as they are."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from minigen import LLM, SamplingParams
from minigen.assembly.cpu import has_numba, stored_form
from minigen.checkpoint.checkpoint import open_checkpoint
from minigen.checkpoint.safetensors import IntegerCodes
from tests.quantized_files import SCHEMES, Scheme, gptq, save, tensors_of
from tests.tiny import save_tokenizer

pytestmark = pytest.mark.skipif(not has_numba(), reason="the packed forms need Numba")
DOWN = "model.layers.0.mlp.down_proj.weight"
LANES = 16


def numbers_of_codes4(words: np.ndarray, rows: int, columns: int) -> Tensor:
    """Decode panels of 4 bits as `Codes4` describes them: codes, scales, and offsets in 256ths."""
    groups = words.view(np.uint8).reshape(rows // LANES, columns // 32, 320)
    codes = groups[..., :256].reshape(*groups.shape[:2], 4, LANES, 4)
    low, high = (each.transpose(0, 3, 1, 2, 4) for each in (codes & 15, codes >> 4))
    steps = np.ascontiguousarray(groups[..., 256:]).reshape(rows // LANES, -1, 2, 2 * LANES)
    steps = steps.transpose(2, 0, 1, 3).copy()
    scales, offsets = steps[0].view(np.float16), steps[1].view(np.int16) / np.float32(256)
    scales, offsets = (
        each.astype(np.float32).transpose(0, 2, 1)[..., None] for each in (scales, offsets)
    )
    both = np.concatenate([low.reshape(*low.shape[:3], 16), high.reshape(*high.shape[:3], 16)], -1)
    return torch.from_numpy(((both + offsets) * scales).reshape(rows, columns))


def numbers_of_codes8(words: np.ndarray, rows: int, columns: int) -> Tensor:
    """Decode panels of 8 bits as `Codes8` describes them: codes plus 128, then scales."""
    groups = words.view(np.uint8).reshape(rows // LANES, columns // 32, 544)
    codes = groups[..., :512].reshape(*groups.shape[:2], 8, LANES, 4).transpose(0, 3, 1, 2, 4)
    scales = np.ascontiguousarray(groups[..., 512:]).view(np.float16).astype(np.float32)
    scales = scales.transpose(0, 2, 1)[..., None]
    signed = codes.reshape(*codes.shape[:3], 32).astype(np.float32) - 128
    return torch.from_numpy((signed * scales).reshape(rows, columns))


def packed_numbers(folder: Path, scheme: Scheme, form: str) -> tuple[Tensor, Tensor]:
    """Return the numbers of a packed matrix, and those of the file."""
    from minigen.kernels.cpu.packed_weights import pack_weight

    tensors, numbers = tensors_of(scheme)
    tensor = open_checkpoint(save(folder / "model", tensors, scheme.settings)).tensors[DOWN]
    decode = numbers_of_codes4 if form == "int4" else numbers_of_codes8
    words = pack_weight(tensor, form).words
    return decode(words, *tensor.shape), torch.from_numpy(numbers[DOWN])


@pytest.mark.parametrize(
    "name", ["gptq 4 v1", "gptq 4 v2", "gptq 4 whole rows", "packed 4", "a ragged last group"]
)
def test_symmetric_codes_of_4_bits_are_packed_exactly(name: str, tmp_path: Path) -> None:
    scheme = {**SCHEMES, "a ragged last group": gptq(4, 64, 2, symmetric=True)}[name]
    for form in ("int4", "int8"):
        (tmp_path / form).mkdir()
        found, expected = packed_numbers(tmp_path / form, scheme, form)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["awq", "gptq 4 v1 asymmetric", "packed 4 asymmetric", "gptq 2"])
@pytest.mark.parametrize("form", ["int4", "int8"])
def test_zero_points_round_nothing(name: str, form: str, tmp_path: Path) -> None:
    found, expected = packed_numbers(tmp_path, SCHEMES[name], form)
    assert torch.equal(found, expected)


def test_numbers_of_mxfp4_are_halves_of_integers_and_packed_exactly(tmp_path: Path) -> None:
    found, expected = packed_numbers(tmp_path, SCHEMES["mxfp4"], "int8")
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["gptq 8", "packed 8", "int rows", "int groups of 4 bits"])
def test_codes_of_8_bits_are_packed_as_they_are(name: str, tmp_path: Path) -> None:
    found, expected = packed_numbers(tmp_path, SCHEMES[name], "int8")
    torch.testing.assert_close(found, expected, rtol=1 / 2048, atol=0)  # of scales in float32
    if name in ("gptq 8", "packed 8"):  # whose scales float16 holds
        assert torch.equal(found, expected)


FORMS = {
    "gptq 4 v1": ("int4", "as stored"),
    "gptq 4 whole rows": ("int4", "as stored"),
    "gptq 2": ("int4", "as stored"),
    "awq": ("int4", "as stored"),
    "packed 4": ("int4", "as stored"),
    "packed 8": ("int8", "as stored"),
    "gptq 8": ("int8", "as stored"),
    "packed 5": ("int8", "as stored, scales rounded to float16"),
    "int rows": ("int8", "as stored, scales rounded to float16"),
    "gptq 4 v2 asymmetric": ("int8", "7 matrices rounded to int8"),  # groups of 16
    "gptq 4 desc_act": ("int8", "7 matrices rounded to int8"),
    "gptq 8 asymmetric": ("int8", "7 matrices rounded to int8"),
    "fp8 blocks": ("int8", "7 matrices rounded to int8"),
    "mxfp4": ("int8", "as stored"),
    "nvfp4": ("int8", "7 matrices rounded to int8"),  # groups of 16
    "nf4": ("int8", "7 matrices rounded to int8"),
}


@pytest.mark.parametrize("name", FORMS)
def test_the_stored_form_and_what_it_rounds_are_said(name: str, tmp_path: Path) -> None:
    from minigen.assembly.cpu import how_kept

    tensors, _ = tensors_of(SCHEMES[name])
    checkpoint = open_checkpoint(save(tmp_path, tensors, SCHEMES[name].settings))
    form = stored_form(checkpoint)
    assert (form, how_kept(checkpoint, form)) == FORMS[name]


def test_scales_that_float16_cannot_hold_are_rounded_with_their_codes() -> None:
    from minigen.kernels.cpu.packed_weights import keeps_codes

    def codes(scale: float, bits: int = 4, size: int = 32, zero: int = 8) -> IntegerCodes:
        scales = torch.full((16, 2), scale)
        zeros = torch.full((16, 2), zero, dtype=torch.int32)
        return IntegerCodes(bits, size, scales, zeros, lambda: torch.zeros(16, 64).to(torch.uint8))

    assert keeps_codes(codes(0.01), "int4")
    assert not keeps_codes(codes(1e-7), "int4")
    assert not keeps_codes(codes(70_000.0), "int8")
    assert keeps_codes(codes(10_000.0), "int4")  # float16 need not hold the minimum, -80,000
    assert keeps_codes(codes(10_000.0), "int8")
    assert not keeps_codes(codes(0.01, bits=5), "int4")
    assert not keeps_codes(codes(0.01, size=48), "int4")
    assert not keeps_codes(codes(0.01, bits=8, zero=127), "int8")
    assert keeps_codes(codes(0.01, bits=8, zero=128), "int8")
    assert not keeps_codes(codes(0.01), "bfloat16")


def test_an_engine_answers_as_with_the_dequantised_numbers(tmp_path: Path) -> None:
    scheme = gptq(4, 32, 1, symmetric=False, desc_act=True)
    tensors, numbers = tensors_of(scheme)
    plain = {n: t for n, t in tensors.items() if n.endswith(".weight")}
    plain |= {name: torch.from_numpy(each) for name, each in numbers.items()}
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    texts = []
    for folder, own, settings in (("q", tensors, scheme.settings), ("p", plain, None)):
        path = save(tmp_path / folder, own, settings)
        save_tokenizer(path)
        answers = LLM.load(path, weights="float32").generate(["abc", "x"], greedy)
        texts.append([each.token_ids for each in answers])
    assert texts[0] == texts[1]
