"""Lesson of chapter 11: headers, shards, openings, and numbers as bits agree with libraries."""

import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from minigen.checkpoint import quant_formats
from minigen.checkpoint.gguf import read_gguf
from minigen.checkpoint.quant_formats import FORMATS, unpack_q4_1
from minigen_course.ch11_weights import lesson, reference
from minigen_course.ch11_weights.lesson import Opening
from minigen_course.ch11_weights.number_formats import (
    FLOATS,
    bits_per_weight,
    encode_float,
    encode_integer,
    float_of_bits,
    rounding_error,
)
from minigen_course.ch11_weights.reference import DTYPES, pack_q4_1, read_safetensors_header
from tests.gguf_files import write_gguf


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    raw = path.read_bytes()
    return {
        name: torch.frombuffer(bytearray(raw[each.begin : each.end]), dtype=DTYPES[each.dtype])
        .reshape(each.shape)
        .clone()
        for name, each in read_safetensors_header(path).items()
    }


def written(path: Path, header: dict[str, Any], num_bytes: int) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(num_bytes))
    return path


def entry(begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]}


def test_a_header_with_metadata_leads_to_the_librarys_tensors(tmp_path: Path) -> None:
    given = {
        "half": torch.randn(3).half(),
        "brain": torch.randn(2, 5).bfloat16(),
        "single": torch.randn(7),
    }
    for number, metadata in enumerate((None, {"format": "pt"}, {"a": "b" * 99})):
        path = tmp_path / f"{number}.safetensors"
        save_file(given, path, metadata=metadata)
        found, library = tensors_of(path), load_file(path)
        assert found.keys() == library.keys()
        assert all(torch.equal(found[name], library[name]) for name in library)


@pytest.mark.parametrize(
    ("header", "num_bytes"),
    [
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12),
        ({"a": entry(0, 8), "b": entry(12, 20)}, 20),
        ({"a": entry(0, 8)}, 4),
        ({"a": entry(0, 8)}, 12),
    ],
    ids=["overlap", "gap", "cut short", "left over"],
)
def test_what_the_library_refuses_is_refused(
    tmp_path: Path, header: dict[str, Any], num_bytes: int
) -> None:
    path = written(tmp_path / "broken.safetensors", header, num_bytes)
    with pytest.raises(SafetensorError):
        load_file(path)
    with pytest.raises(ValueError, match="byte"):
        read_safetensors_header(path)


def test_shards_are_mapped_and_a_false_index_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.arange(3.0)}, tmp_path / "1.safetensors", metadata={"format": "pt"})
    save_file({"b": torch.arange(4.0)}, tmp_path / "2.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    places = {"a": "1.safetensors", "b": "2.safetensors"}
    index.write_text(json.dumps({"weight_map": places}), encoding="utf-8")
    found = reference.map_shards(tmp_path)
    assert {name: each.tolist() for name, each in found.items()} == {
        "a": [0, 1, 2],
        "b": [0, 1, 2, 3],
    }
    false_places = {
        "c": {**places, "c": "2.safetensors"},
        "a": {"a": "2.safetensors", "b": "1.safetensors"},
    }
    for lost, each in false_places.items():
        index.write_text(json.dumps({"weight_map": each}), encoding="utf-8")
        with pytest.raises(ValueError, match=f"lists {lost}"):
            reference.map_shards(tmp_path)


def test_packed_blocks_are_those_of_the_gguf_library() -> None:
    numbers = torch.randn(64, 256, generator=torch.Generator().manual_seed(3))
    library = torch.from_numpy(quantize(numbers.numpy(), GGMLQuantizationType.Q4_1))
    same = (pack_q4_1(numbers) == library.unflatten(-1, (-1, 20))).float().mean()
    assert same > 0.98, "the library divides by the scale before it is rounded"
    back = unpack_q4_1(pack_q4_1(numbers))
    assert torch.equal(unpack_q4_1(pack_q4_1(back.flatten(-2))), back), "nothing is lost twice"


KINDS = {
    "FP32": (torch.float32, torch.int32),
    "FP16": (torch.float16, torch.int16),
    "BF16": (torch.bfloat16, torch.int16),
    "FP8 E4M3": (torch.float8_e4m3fn, torch.uint8),
    "FP8 E5M2": (torch.float8_e5m2, torch.uint8),
}


@pytest.mark.parametrize("form", FLOATS, ids=lambda form: form.name)
def test_bits_of_numbers_are_torchs(form: Any) -> None:
    dtype, integer = KINDS[form.name]
    generator = np.random.default_rng(5)
    numbers = generator.standard_normal(300) * 10.0 ** generator.uniform(-9, 2, 300)
    for number in [0.0, -0.0, 1.0, form.largest, -form.smallest_normal, *numbers.tolist()]:
        stored = encode_float(number, form)
        bits = int("".join(text for _, text in stored.fields), 2)
        right = torch.tensor(number, dtype=torch.float64).to(dtype)
        assert bits == int(right.view(integer)) % 2**form.num_bits, number
        assert stored.value == float(right)
        if form.has_infinity:
            text = "".join(text for _, text in stored.fields)
            assert float_of_bits(text, form.exponent_bits) == stored.value


def test_numbers_beyond_a_format_become_infinite_or_the_largest() -> None:
    single, half, _, e4m3, e5m2 = FLOATS
    assert encode_float(-70000, half).value == -math.inf
    assert dict(encode_float(math.inf, half).fields)["exponent"] == "11111"
    assert encode_float(1e9, e4m3).value == e4m3.largest == 448
    assert encode_float(57344, e5m2).value == 57344
    assert encode_float(1e-46, single).value == 0
    with pytest.raises(ValueError, match="nan is not a number"):
        encode_float(math.nan, half)


def test_integers_share_a_scale() -> None:
    assert encode_integer(0.1, 1, 4).value == pytest.approx(1 / 7)
    assert encode_integer(0.1, 100, 8).value == 0
    assert encode_integer(-1, 1, 4).fields == (("integer", "1001"),)
    with pytest.raises(ValueError, match="above 0"):
        encode_integer(0, 0, 8)


def test_fewer_bits_lose_more() -> None:
    numbers = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    kinds = ("F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
    errors = [rounding_error(kind, numbers) for kind in kinds]
    bits = [bits_per_weight(kind) for kind in kinds]
    assert errors == sorted(errors)
    assert bits == [32, 16, 16, 8.5, 6, 5.5, 5, 4.5]


def opened(seconds: float, from_disk: float | None = 1.0) -> Opening:
    return Opening(seconds / 2, seconds / 2, 0, 10, 0, from_disk)


def test_cold_openings_count_only_if_they_agree_and_the_disk_was_read() -> None:
    cold = [opened(0.5), opened(0.6), opened(0.45)]
    assert lesson.spread(cold) == pytest.approx(4 / 3)
    assert lesson.is_sound(cold)
    assert not lesson.is_sound([*cold, opened(0.8)])
    assert not lesson.is_sound([*cold, opened(0.5, 0.1)])
    assert not lesson.is_sound([*cold, opened(0.5, None)])


def test_openings_are_repeated_in_turns(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(2**20))
    order: list[str] = []

    def opener(name: str, read: Any) -> Any:
        def open_file(path: Path) -> torch.Tensor:
            order.append(name)
            return read(path)

        return open_file

    own = lesson.copy_to_disk(path, tmp_path / "copy")
    ways = {"eager": ("e", lesson.read_bytes), "mapped": ("m", lesson.map_bytes)}
    openers = {name: (own, opener(*each)) for name, each in ways.items()}
    found = lesson.measure_openings(openers, rounds=3)
    assert "".join(order) == "mmeeeemmmmee"
    assert list(found) == ["eager, warm", "mapped, warm", "eager, cold", "mapped, cold"]
    assert all(len(each) == 2 for each in found.values())
    assert lesson.middle(found["eager, warm"]).seconds > 0
    assert list(lesson.measure_openings(openers, ["warm"], 2)) == ["eager, warm", "mapped, warm"]


def test_a_file_is_read_into_new_memory_or_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 2**12)
    assert lesson.settle(path) == path
    assert lesson.read_bytes(path).tolist() == list(path.read_bytes())
    assert torch.equal(lesson.read_bytes(path), lesson.map_bytes(path))
    assert lesson.reread_seconds(path) > 0


def test_memory_is_counted_again_for_each_run() -> None:
    made, seconds, megabytes = lesson.median_cost(lambda: b"x" * 2**26, repeats=3)
    assert len(made) == 2**26
    assert seconds > 0
    assert megabytes > 40


def test_the_table_of_formats_follows_its_module() -> None:
    own = FORMATS["Q4_1"].unpack
    with patch.object(quant_formats, "unpack_q4_1", lambda blocks: blocks):
        assert FORMATS["Q4_1"].unpack is own
        with lesson.refreshed_formats():
            assert FORMATS["Q4_1"].unpack is quant_formats.unpack_q4_1
    assert FORMATS["Q4_1"].unpack is own


def test_a_gguf_file_can_be_read_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", {}, {"output_norm.weight": (np.ones(8, np.float32), None)})
    seen: list[Path] = []

    def read(path: Path) -> torch.Tensor:
        seen.append(path)
        return lesson.read_bytes(path)

    with lesson.opened_by(read):
        assert read_gguf(path).tensors["output_norm.weight"].dequantize().tolist() == [1.0] * 8
    assert seen == [path]
