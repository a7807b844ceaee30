"""Stored tensors: every type of number is decoded as its format defines, cut and reordered."""

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.torch import save_file

from minigen.checkpoint.config_json import read_config_of
from minigen.checkpoint.quant_formats import FORMATS
from minigen.checkpoint.safetensors import StoredTensor, check_tensors, read_safetensors
from minigen.errors import FileFormatError, MinigenError, UnsupportedError, WeightsError
from minigen.model.transformer import expected_tensors
from tests.tiny import save_model

# The position of the float16 scales in a block; random bytes there would make NaN and infinity.
SCALES = {
    **dict.fromkeys(("Q8_0", "Q4_0", "Q5_0"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    **dict.fromkeys(("IQ4_NL", "IQ4_XS"), (0,)),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
KINDS = tuple(FORMATS)
SHAPES = ((1, 1), (1, 5), (7, 1), (3, 3), (1029, 2))  # rows, blocks per row


def random_bytes(kind: str, rows: int, blocks: int) -> np.ndarray:
    """Return random rows of a type, in which every bit may be set, with finite scales."""
    rng = np.random.default_rng(11)
    block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    if block_size == 1:
        numbers = rng.normal(0, 3, (rows, blocks)).astype(np.float32)
        if kind == "BF16":
            return (numbers.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
        return numbers.astype({"F32": "<f4", "F16": "<f2"}[kind]).view(np.uint8)
    raw = rng.integers(0, 256, (rows, blocks, block_bytes), dtype=np.uint8)
    if kind == "MXFP4":  # a power of two; the largest would make infinities
        raw[..., 0] = rng.integers(100, 140, raw.shape[:-1])
    for at in SCALES.get(kind, ()):
        scales = rng.normal(0, 0.1, (rows, blocks, 1)).astype("<f2")
        raw[..., at : at + 2] = scales.view(np.uint8)
    return raw.reshape(rows, -1)


def stored(kind: str, rows: int = 6, blocks: int = 4) -> StoredTensor:
    raw = random_bytes(kind, rows, blocks)
    return StoredTensor("w", kind, (rows, blocks * FORMATS[kind].block_size), torch.from_numpy(raw))


def oracle(tensor: StoredTensor) -> torch.Tensor:
    """Return what the gguf library reads from the same bytes."""
    kind = GGMLQuantizationType[tensor.kind]
    dtype = {"F32": "<f4", "F16": "<f2"}.get(tensor.kind, np.uint8)
    return torch.from_numpy(gguf.quants.dequantize(tensor.data.numpy().view(dtype), kind).copy())


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "blocks"), SHAPES)
def test_every_type_of_number_is_decoded_as_the_gguf_library_does(
    kind: str, rows: int, blocks: int
) -> None:
    tensor = stored(kind, rows, blocks)
    expected = oracle(tensor)
    assert expected.isfinite().all()
    assert_same(tensor.dequantize(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_library_agrees_on_how_large_a_block_is(kind: str) -> None:
    ours = FORMATS[kind]
    assert (ours.block_size, ours.block_bytes) == GGML_QUANT_SIZES[GGMLQuantizationType[kind]]


@pytest.mark.parametrize("kind", KINDS)
def test_other_dtypes_are_the_float32_numbers_rounded_once(kind: str) -> None:
    tensor = stored(kind)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert_same(tensor.dequantize(dtype), oracle(tensor).to(dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_columns_are_cut_out_of_the_file_before_they_are_read(kind: str) -> None:
    tensor, block = stored(kind), FORMATS[kind].block_size
    expected = oracle(tensor)
    assert_same(tensor.rows(2, 5).dequantize(), expected[2:5])
    assert_same(tensor.columns(block, 3 * block).dequantize(), expected[:, block : 3 * block])
    both = tensor.rows(1, 6).columns(block, 4 * block).rows(3, 5).columns(block, 2 * block)
    assert_same(both.dequantize(), expected[4:6, 2 * block : 3 * block])
    assert both.num_bytes == 2 * FORMATS[kind].block_bytes
    assert both.data.untyped_storage().data_ptr() == tensor.data.untyped_storage().data_ptr()


@pytest.mark.parametrize("kind", KINDS)
def test_a_vector_is_cut_at_blocks(kind: str) -> None:
    form = FORMATS[kind]
    raw = torch.from_numpy(random_bytes(kind, 1, 5))
    vector = StoredTensor("w", kind, (5 * form.block_size,), raw)
    expected = oracle(stored(kind, 1, 5))[0]
    assert_same(vector.dequantize(), expected)
    cut = vector.rows(2 * form.block_size, 4 * form.block_size)
    assert cut.shape == (2 * form.block_size,)
    assert_same(cut.dequantize(), expected[2 * form.block_size : 4 * form.block_size])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_another_order_are_read_cut_and_put_into_memory_in_that_order(kind: str) -> None:
    plain, block = stored(kind, rows=1500), FORMATS[kind].block_size
    order = torch.randperm(1500, generator=torch.Generator().manual_seed(5))
    tensor = StoredTensor("w", kind, plain.shape, plain.data, order)
    expected = oracle(plain)[order]
    assert_same(tensor.dequantize(), expected)
    assert_same(tensor.rows(3, 1400).dequantize(), expected[3:1400])
    assert_same(tensor.rows(3, 1400).rows(7, 9).dequantize(), expected[10:12])
    cut = tensor.columns(block, 2 * block).rows(0, 2)
    assert cut.num_bytes == 2 * FORMATS[kind].block_bytes
    assert_same(cut.dequantize(), expected[:2, block : 2 * block])


def test_numbers_can_be_read_into_existing_memory() -> None:
    tensor = stored("Q4_1")
    fused = torch.full((10, tensor.shape[1]), 7.0, dtype=torch.bfloat16)
    result = tensor.dequantize(out=fused[2:8])
    assert result.data_ptr() == fused[2].data_ptr()
    assert_same(fused[2:8], oracle(tensor).bfloat16())
    assert (fused[:2] == 7).all()
    assert (fused[8:] == 7).all()


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 0), (3, 2), (-1, 2), (0, 7), (6, 7)], ids=lambda n: str(n)
)
def test_missing_rows_are_refused(start: int, stop: int) -> None:
    with pytest.raises(IndexError, match=f"rows 0 to 6, not {start} to {stop}"):
        stored("Q8_0").rows(start, stop)


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (32, 160), (-32, 32), (64, 32)])
def test_missing_columns_are_refused(start: int, stop: int) -> None:
    with pytest.raises(IndexError, match=f"no columns {start} to {stop}"):
        stored("Q8_0").columns(start, stop)


@pytest.mark.parametrize(("start", "stop"), [(0, 31), (1, 32), (16, 48)])
def test_a_cut_through_a_block_is_refused(start: int, stop: int) -> None:
    with pytest.raises(IndexError, match="multiples of 32"):
        stored("Q8_0").columns(start, stop)


# --- safetensors -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_safetensors_are_read_as_they_were_written(dtype: torch.dtype, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    tensors = {
        "one": torch.randn(1, generator=generator).to(dtype),
        "vector": torch.randn(37, generator=generator).to(dtype),
        "matrix": torch.randn(5, 13, generator=generator).to(dtype),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    read = read_safetensors(tmp_path)
    assert read.keys() == tensors.keys()
    for name, expected in tensors.items():
        assert read[name].shape == expected.shape
        assert read[name].num_bytes == expected.numel() * expected.itemsize
        assert_same(read[name].dequantize(), expected.float())
    assert_same(
        read["matrix"].rows(1, 4).columns(2, 9).dequantize(dtype), tensors["matrix"][1:4, 2:9]
    )


def test_opening_safetensors_maps_them_and_reads_none(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(64, 64)}, path)
    opened = read_safetensors(path)
    with path.open("r+b") as file:  # a later write is visible: nothing was copied
        file.seek(-4, 2)
        file.write(struct.pack("<f", 5.0))
    assert opened["w"].dequantize()[-1, -1] == 5


def test_shards_are_the_same_as_one_file(tmp_path: Path) -> None:
    whole, sharded = tmp_path / "whole", tmp_path / "sharded"
    save_model(whole, "qwen3")
    save_model(sharded, "qwen3", max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) >= 4
    expected, found = read_safetensors(whole), read_safetensors(sharded)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same(found[name].dequantize(), tensor.dequantize())


def sharded(directory: Path) -> dict[str, Any]:
    """Write two shards with two tensors; return the index, which the test then breaks."""
    save_file({"a": torch.ones(2)}, directory / "one.safetensors")
    save_file({"b": torch.ones(3)}, directory / "two.safetensors")
    return {"metadata": {}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}


def write_index(directory: Path, index: Any) -> None:
    (directory / "model.safetensors.index.json").write_text(
        index if isinstance(index, str) else json.dumps(index), encoding="utf-8"
    )


def test_two_shards_with_a_sound_index_are_read(tmp_path: Path) -> None:
    write_index(tmp_path, sharded(tmp_path))
    assert set(read_safetensors(tmp_path)) == {"a", "b"}


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        (
            {"a": "one.safetensors", "b": "../evil.safetensors"},
            "'../evil.safetensors' must be a file",
        ),
        ({"a": "one.safetensors", "b": "/etc/passwd"}, "'/etc/passwd' must be a file"),
        ({"a": "one.safetensors", "b": ".."}, r"'..' must be a file"),
        ({"a": "one.safetensors", "b": ""}, "'' must be a file"),
        ({"a": "one.safetensors", "b": "two\0.safetensors"}, r"not printable: 'two\\x00"),
        ({"a": "one.safetensors", "b\x1b[31m": "two.safetensors"}, r"not printable: 'b\\x1b"),
        ({"a": "one.safetensors", "b": "three.safetensors"}, r"three.safetensors is missing"),
        ({"a": "one.safetensors", "b": "one.safetensors"}, "lists b in one.safetensors, which doe"),
        ({"a": "one.safetensors"}, None),
        ({"a": "two.safetensors", "b": "two.safetensors"}, "lists a in two.safetensors, which doe"),
        (
            {"a": "two.safetensors", "b": "one.safetensors"},
            "holds a, but .* does not list it",
        ),
        ({"a": 3}, "must have a weight_map"),
        ([], "must have a weight_map"),
        (None, "must have a weight_map"),
    ],
)
def test_an_index_that_does_not_fit_its_shards_is_refused(
    weight_map: Any, words: str | None, tmp_path: Path
) -> None:
    index = {**sharded(tmp_path), "weight_map": weight_map}
    write_index(tmp_path, index)
    if words is None:  # a file that the index does not name is not part of the model
        assert set(read_safetensors(tmp_path)) == {"a"}
        return
    with pytest.raises(FileFormatError, match=words):
        read_safetensors(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [("", "cannot be read as JSON"), ("[1]", "holds a list"), ('{"weight_map"', "cannot be read")],
)
def test_an_index_that_is_not_a_json_object_is_refused(
    content: str, words: str, tmp_path: Path
) -> None:
    write_index(tmp_path, content)
    with pytest.raises(FileFormatError, match=words):
        read_safetensors(tmp_path)


def test_a_directory_must_hold_one_set_of_weights(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"no \.safetensors file"):
        read_safetensors(tmp_path)
    sharded(tmp_path)
    with pytest.raises(FileFormatError, match="2 of them and no index"):
        read_safetensors(tmp_path)
    save_file({"whole": torch.ones(1)}, tmp_path / "model.safetensors")
    assert set(read_safetensors(tmp_path)) == {"whole"}
    write_index(tmp_path, {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})
    assert set(read_safetensors(tmp_path)) == {"whole"}  # transformers chooses the same


def safetensors_bytes(header: Any, data: bytes, length: int | None = None) -> bytes:
    """Return a safetensors file; `header` is an object or the text of the header."""
    text = header if isinstance(header, str) else json.dumps(header)
    raw = text.encode("utf-8", errors="surrogateescape")
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(shape: list[Any], start: Any, stop: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


GOOD = safetensors_bytes({"w": entry([2, 2], 0, 16), "v": entry([2], 16, 24)}, bytes(24))

BAD_SAFETENSORS = {
    "empty": b"",
    "only a length": GOOD[:8],
    "header of 2^63 bytes": safetensors_bytes({}, b"", length=2**63),
    "header of 2^64 - 1 bytes": safetensors_bytes({}, b"", length=2**64 - 1),
    "header of 101 MB": safetensors_bytes({}, b"", length=101_000_000),
    "header of no bytes": safetensors_bytes("", b""),
    "header that is no JSON": safetensors_bytes("{{{{", b""),
    "header that is a list": safetensors_bytes("[]", b""),
    "header that is not UTF-8": safetensors_bytes("{\udcff}", b""),
    "header nested 100,000 deep": safetensors_bytes("[" * 100_000, b""),
    "cut in the data": GOOD[:-1],
    "bytes behind the data": GOOD + b"\0",
    "tensor without offsets": safetensors_bytes({"w": {"dtype": "F32", "shape": [1]}}, bytes(4)),
    "tensor that is no object": safetensors_bytes({"w": 3}, bytes(4)),
    "negative offset": safetensors_bytes({"w": entry([1], -4, 0)}, bytes(4)),
    "offset of 2^64": safetensors_bytes({"w": entry([1], 0, 2**64)}, bytes(4)),
    "offsets the wrong way round": safetensors_bytes({"w": entry([1], 4, 0)}, bytes(4)),
    "offset beyond the file": safetensors_bytes({"w": entry([2**40], 0, 2**42)}, bytes(4)),
    "shape that overflows": safetensors_bytes({"w": entry([2**63, 2], 0, 4)}, bytes(4)),
    "negative size": safetensors_bytes({"w": entry([-1], 0, 4)}, bytes(4)),
    "shape that does not fit its bytes": safetensors_bytes({"w": entry([2], 0, 4)}, bytes(4)),
    "shape of strings": safetensors_bytes({"w": entry(["1"], 0, 4)}, bytes(4)),
    "overlapping tensors": safetensors_bytes(
        {"w": entry([2], 0, 8), "v": entry([2], 4, 12)}, bytes(12)
    ),
    "hole between tensors": safetensors_bytes(
        {"w": entry([1], 0, 4), "v": entry([1], 8, 12)}, bytes(12)
    ),
    "unknown dtype": safetensors_bytes({"w": entry([1], 0, 4, "Q4_1")}, bytes(4)),
    "dtype that is a number": safetensors_bytes({"w": entry([1], 0, 4, 32)}, bytes(4)),
    "tensor listed twice": safetensors_bytes(
        '{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, '
        '"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        bytes(8),
    ),
}


@pytest.mark.parametrize("what", BAD_SAFETENSORS)
def test_a_broken_safetensors_file_is_refused_by_name(what: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(BAD_SAFETENSORS[what])
    with pytest.raises(
        FileFormatError, match=r"model.safetensors is not a valid safetensors file: "
    ) as e:
        read_safetensors(tmp_path)
    assert "\n" not in str(e.value)


def test_the_file_that_the_broken_ones_are_made_from_is_sound(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(GOOD)
    assert set(read_safetensors(tmp_path)) == {"w", "v"}


def test_a_safetensors_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for length in range(len(GOOD)):
        path.write_bytes(GOOD[:length])
        with pytest.raises(FileFormatError, match="not a valid safetensors file"):
            read_safetensors(path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_directory_instead_of_a_file_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(FileFormatError, match=name):
        read_safetensors(tmp_path)


@pytest.mark.parametrize(
    ("dtype", "width"),
    [
        *(("F64", 8), ("I64", 8), ("I32", 4), ("I16", 2), ("I8", 1), ("U8", 1), ("BOOL", 1)),
        *(("F8_E4M3", 1), ("F8_E5M2", 1), ("F8_E8M0", 1), ("C64", 8), ("U16", 2), ("U64", 8)),
    ],
)
def test_numbers_that_minigen_does_not_read_are_refused_by_name(
    dtype: str, width: int, tmp_path: Path
) -> None:
    raw = safetensors_bytes({"odd.weight": entry([4], 0, 4 * width, dtype)}, bytes(4 * width))
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(UnsupportedError, match=r"odd.weight is stored as .*; minigen reads F32"):
        read_safetensors(tmp_path)


@pytest.mark.parametrize(
    ("dtype", "shape", "num_bytes"), [("F4", [4], 2), ("F6_E2M3", [4], 3), ("F6_E3M2", [4], 3)]
)
def test_numbers_narrower_than_a_byte_are_refused(
    dtype: str, shape: list[int], num_bytes: int, tmp_path: Path
) -> None:
    raw = safetensors_bytes({"odd": entry(shape, 0, num_bytes, dtype)}, bytes(num_bytes))
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(MinigenError, match=r"model.safetensors"):
        read_safetensors(tmp_path)


@pytest.mark.parametrize("shape", [[], [0], [0, 3], [2, 1, 2]], ids=str)
def test_only_vectors_and_matrices_are_read(shape: list[int], tmp_path: Path) -> None:
    num_bytes = 4 * int(np.prod(shape))
    raw = safetensors_bytes({"odd": entry(shape, 0, num_bytes)}, bytes(num_bytes))
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(UnsupportedError, match="odd has the shape"):
        read_safetensors(tmp_path)


@pytest.mark.parametrize("padding", range(8))
def test_tensors_that_lie_unaligned_in_their_file_are_read_or_refused(
    padding: int, tmp_path: Path
) -> None:
    numbers = np.arange(6, dtype="<f4")
    text = json.dumps({"w": entry([2, 3], 0, 24)}) + " " * padding
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes(text, numbers.tobytes()))
    assert_same(read_safetensors(path)["w"].dequantize().flatten(), torch.from_numpy(numbers))


# --- tensors that exist, and tensors that are expected ----------------------------------------


def vectors(**lengths: int) -> dict[str, StoredTensor]:
    return {
        name: StoredTensor(name, "F32", (n,), torch.zeros(1, 4 * n, dtype=torch.uint8))
        for name, n in lengths.items()
    }


def test_tensors_that_fit_are_accepted() -> None:
    check_tensors(vectors(a=3, b=1), {"b": (1,), "a": (3,)}, "here")


def test_one_error_lists_everything_that_is_wrong_with_the_tensors() -> None:
    expected = {"a": (3,), "lost": (2, 5), "b": (1,), "gone": (7,)}
    with pytest.raises(WeightsError) as error:
        check_tensors(vectors(a=4, b=2, extra=1), expected, "here")
    assert str(error.value) == (
        "here does not fit its configuration: 2 missing: lost (2, 5); gone (7,). "
        "1 unexpected: extra (1,). 2 of a wrong shape: a expected (3,), found (4,); b expected "
        "(1,), found (2,)."
    )


def test_of_many_wrong_tensors_the_first_few_are_named() -> None:
    with pytest.raises(
        WeightsError, match=r"1000 missing: t0 \(1,\); .*t7 \(1,\); \.\.\.\.$"
    ) as error:
        check_tensors({}, {f"t{n}": (1,) for n in range(1000)}, "here")
    assert "t8" not in str(error.value)


def test_a_checkpoint_of_another_size_than_its_config_says_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    changed = {**config, "num_hidden_layers": 4, "intermediate_size": 81, "mlp_bias": True}
    (tmp_path / "config.json").write_text(json.dumps(changed), encoding="utf-8")
    with pytest.raises(WeightsError) as error:
        check_tensors(
            read_safetensors(tmp_path), expected_tensors(read_config_of(tmp_path)), "here"
        )
    assert "model.layers.0.mlp.gate_proj.bias (81,)" in str(error.value)
    assert "down_proj.weight expected (48, 81), found (48, 80)" in str(error.value)
