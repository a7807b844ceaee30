"""GGUF: the gguf library's own reader finds the same file, and transformers the same model."""

import math
import mmap
import os
import re
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from huggingface_hub import save_torch_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

from minigen import hub
from minigen.checkpoint.checkpoint import Checkpoint, open_checkpoint
from minigen.checkpoint.gguf import TENSOR_TYPES, GGUFFile, ValueType, read_gguf
from minigen.checkpoint.gguf_mapping import unpermuted_rows
from minigen.checkpoint.quant_formats import FORMATS
from minigen.errors import (
    ConfigError,
    FileFormatError,
    MinigenError,
    ModelNotFoundError,
    UnsupportedError,
    WeightsError,
)
from minigen.model.attention import attend_packed
from minigen.model.transformer import Transformer, build_transformer, dense_linear
from minigen_course.ch17_dense_cache.reference import DenseCache, attend_dense
from tests.gguf_files import Part, Value, permuted, raw_gguf, text, uint32, write_gguf, write_model
from tests.tiny import VARIANTS, make_model

Kind = GGUFValueType

VALUES: dict[str, Value] = {
    "a.uint8": Value(Kind.UINT8, 255),
    "a.int8": Value(Kind.INT8, -128),
    "a.uint16": Value(Kind.UINT16, 65_535),
    "a.int16": Value(Kind.INT16, -32_768),
    "a.uint32": Value(Kind.UINT32, 2**32 - 1),
    "a.int32": Value(Kind.INT32, -(2**31)),
    "a.uint64": Value(Kind.UINT64, 2**64 - 1),
    "a.int64": Value(Kind.INT64, -(2**63)),
    "a.float32": Value(Kind.FLOAT32, 0.1),
    "a.float32.large": Value(Kind.FLOAT32, 3e38),
    "a.float64": Value(Kind.FLOAT64, 0.1),
    "a.bool": Value(Kind.BOOL, True),
    "a.bool.not": Value(Kind.BOOL, False),
    "a.string": text("naïve 🦙\n"),
    "a.string.empty": text(""),
    "b.strings": Value(Kind.STRING, ["", "é", "a longer one"], is_array=True),
    "b.uint8s": Value(Kind.UINT8, [0, 255], is_array=True),
    "b.int32s": Value(Kind.INT32, [-1, 2, 2**31 - 1], is_array=True),
    "b.uint64s": Value(Kind.UINT64, [2**64 - 1], is_array=True),
    "b.float32s": Value(Kind.FLOAT32, [0.5, -1.25], is_array=True),
    "b.float64s": Value(Kind.FLOAT64, [0.1], is_array=True),
    "b.bools": Value(Kind.BOOL, [True, False, True], is_array=True),
}


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def assert_same_file(ours: GGUFFile, path: Path, most: int | None = None) -> None:
    """Compare everything that the library's reader finds; compare the numbers of `most` tensors."""
    theirs = gguf.GGUFReader(path)
    fields = {key: each for key, each in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata.keys() == fields.keys()
    for key, expected in fields.items():
        found = plain(ours.metadata[key])
        if expected.types[0] == GGUFValueType.FLOAT32:  # we store its shortest decimal instead
            assert np.float32(found) == np.float32(expected.contents())
        else:
            assert found == expected.contents(), key
            assert type(found) is type(expected.contents())
    assert ours.data_offset == theirs.data_offset
    assert list(ours.tensors) == [each.name for each in theirs.tensors]
    step = 1 if most is None else max(1, len(theirs.tensors) // most)
    for each in theirs.tensors:
        tensor = ours.tensors[each.name]
        assert tensor.kind == each.tensor_type.name
        assert tensor.shape == tuple(reversed(each.shape.tolist()))
        assert ours.offsets[each.name] == each.data_offset
        assert tensor.num_bytes == each.n_bytes
    for each in islice(theirs.tensors, 0, None, step):
        expected = gguf.quants.dequantize(each.data, each.tensor_type)
        found = ours.tensors[each.name].dequantize()
        torch.testing.assert_close(found, torch.tensor(expected), atol=0, rtol=0)


def quantised(kind: str, rows: int, blocks: int) -> np.ndarray:
    """Return rows of blocks whose bytes are all small, so that no scale is NaN."""
    rng = np.random.default_rng(4)
    num_bytes = blocks * GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    return rng.integers(0, 60, (rows, num_bytes), dtype=np.uint8)


def tensors_of_all_kinds() -> dict[str, tuple[np.ndarray, GGMLQuantizationType | None]]:
    rng = np.random.default_rng(9)
    floats = rng.normal(size=(3, 5)).astype(np.float32)
    tensors: dict[str, tuple[np.ndarray, GGMLQuantizationType | None]] = {
        "vector": (floats[0], None),
        "f16": (floats.astype(np.float16), None),
    }
    for kind in set(FORMATS) - {"F32", "F16"}:
        tensors[kind] = (quantised(kind, 3, 2), GGMLQuantizationType[kind])
    return tensors


@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
def test_a_file_of_the_librarys_writer_reads_as_the_librarys_reader_reads_it(
    alignment: int | None, tmp_path: Path
) -> None:
    path = tmp_path / "all.gguf"
    write_gguf(path, "llama", VALUES, tensors_of_all_kinds(), alignment)
    assert_same_file(read_gguf(path), path)


@pytest.mark.parametrize("version", [2, 3])
def test_a_file_written_by_hand_reads_as_the_librarys_reader_reads_it(
    version: int, tmp_path: Path
) -> None:
    path = tmp_path / "hand.gguf"
    parts = [
        Part("one", (3, 1, 1), np.arange(3, dtype="<f4").tobytes()),
        Part("two", (2, 4), np.arange(8, dtype="<f2").tobytes(), GGMLQuantizationType.F16),
    ]
    path.write_bytes(raw_gguf(list(VALUES.items()), parts[1:], version=version).data)
    file = read_gguf(path)
    assert file.version == version
    assert_same_file(file, path)
    path.write_bytes(raw_gguf([], parts, version=version).data)
    assert read_gguf(path).tensors["one"].shape == (1, 3)  # leading sizes of one do not count


def test_a_float32_is_read_as_its_shortest_decimal(tmp_path: Path) -> None:
    path = tmp_path / "f.gguf"
    path.write_bytes(raw_gguf([("eps", Value(Kind.FLOAT32, 1e-5))]).data)
    assert read_gguf(path).metadata["eps"] == 1e-5


def test_the_alignment_of_tensors_need_not_be_a_power_of_two(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    parts = [Part(name, (5,), np.arange(5, dtype="<f4").tobytes()) for name in ("a", "b")]
    path.write_bytes(raw_gguf([("general.alignment", uint32(24))], parts, alignment=24).data)
    assert read_gguf(path).tensors["b"].dequantize().tolist() == [0, 1, 2, 3, 4]


def test_opening_a_file_maps_it_and_reads_no_weight(tmp_path: Path) -> None:
    path = tmp_path / "all.gguf"
    write_gguf(path, "llama", {}, {"w": (np.zeros((8, 1024), dtype=np.float32), None)})
    opened = read_gguf(path)
    with path.open("r+b") as file:
        file.seek(-4, 2)
        file.write(struct.pack("<f", 5.0))
    assert opened.tensors["w"].dequantize()[-1, -1] == 5


# --- the same model in both formats ------------------------------------------------------------


def transformer(checkpoint: Checkpoint) -> Transformer:
    make = dense_linear(torch.float32)
    return build_transformer(checkpoint.config, checkpoint.tensors, torch.float32, make)


@torch.inference_mode()
def logits(checkpoint: Checkpoint) -> torch.Tensor:
    model = transformer(checkpoint)
    ids = torch.randint(0, 211, (23,), generator=torch.Generator().manual_seed(3))
    windows = checkpoint.config.sliding_windows
    return model.logits(model(ids, torch.arange(len(ids)), attend_packed([len(ids)], windows)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_gguf_gives_the_config_and_logits_of_the_safetensors_that_it_was_made_from(
    variant: str, tmp_path: Path
) -> None:
    changes = {"max_window_layers": 0} if variant == "qwen2-window" else {}
    model = make_model(variant, **changes)
    model.save_pretrained(tmp_path / "hf", max_shard_size="1GB")
    write_model(tmp_path / "model.gguf", model)
    expected, found = open_checkpoint(tmp_path / "hf"), open_checkpoint(tmp_path / "model.gguf")

    config = expected.config
    if config.rope_scaling is not None:  # a GGUF has a tensor instead
        assert "rope_freqs.weight" in found.tensors
        config = replace(config, rope_scaling=None)
    if config.family == "mistral" and found.config.family == "llama":
        config = replace(config, family="llama")  # GGUF calls it Llama, unless it has a window
    assert found.config == config
    torch.testing.assert_close(logits(found), logits(expected), atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", ["llama", "llama-biases", "qwen2"])
def test_the_comparison_is_sharp_enough_to_see_rows_in_the_wrong_order(
    variant: str, tmp_path: Path
) -> None:
    model = make_model(variant)
    model.save_pretrained(tmp_path / "hf")
    kinds = ("bias",) if variant == "llama-biases" else ("weight",)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "q_proj" in name and name.endswith(kinds):
                tensor.copy_(permuted(tensor, 6))
    write_model(tmp_path / "wrong.gguf", model)
    wrong, right = open_checkpoint(tmp_path / "wrong.gguf"), open_checkpoint(tmp_path / "hf")
    assert (logits(wrong) - logits(right)).abs().max() > 1e-2


def test_the_rows_of_q_and_k_are_put_back_where_they_were() -> None:
    for rows, heads in ((8, 1), (8, 2), (96, 6), (120, 5)):
        original = torch.arange(rows)
        restored = permuted(original, heads)[unpermuted_rows(rows, heads)]
        assert restored.tolist() == original.tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_checkpoints_give_the_logits_of_their_rounded_weights(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model = make_model("llama-biases").to(dtype)
    model.save_pretrained(tmp_path / "half")
    model.float().save_pretrained(tmp_path / "float")
    half, whole = open_checkpoint(tmp_path / "half"), open_checkpoint(tmp_path / "float")
    assert half.num_bytes * 2 == whole.num_bytes
    assert torch.equal(logits(half), logits(whole))


def test_shards_give_the_logits_of_one_file(tmp_path: Path) -> None:
    model = make_model("llama-rope-llama3")
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="50KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) >= 4
    one, many = open_checkpoint(tmp_path / "one"), open_checkpoint(tmp_path / "many")
    assert one.config == many.config
    assert torch.equal(logits(one), logits(many))


def test_a_checkpoint_reports_its_format_and_size(tmp_path: Path) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path / "hf")
    write_model(tmp_path / "model.gguf", model)
    for path, form in ((tmp_path / "hf", "safetensors"), (tmp_path / "model.gguf", "GGUF")):
        checkpoint = open_checkpoint(path)
        assert checkpoint.form == f"{form} (F32)"
        assert checkpoint.num_parameters == model.num_parameters()
        assert checkpoint.num_bytes == 4 * model.num_parameters()


# --- the default model -------------------------------------------------------------------------


def default_model() -> Path:
    path = hub.find(hub.DEFAULT_MODEL)
    assert path is not None, "run `minigen pull` first"
    return path


@pytest.mark.model
def test_the_default_model_reads_as_the_librarys_reader_reads_it() -> None:
    path = default_model()
    assert_same_file(read_gguf(path), path, most=12)


@torch.inference_mode()
def greedy(checkpoint: Checkpoint, prompt: list[int], num_tokens: int) -> list[int]:
    config, model = checkpoint.config, transformer(checkpoint)
    room = len(prompt) + num_tokens
    cache = DenseCache(config.num_layers, room, config.kv_heads, config.head_dim, torch.float32)
    new, answer = prompt, []
    for _ in range(num_tokens):
        attend = attend_dense([cache], [len(new)], config.sliding_windows)
        positions = torch.arange(cache.num_tokens, cache.num_tokens + len(new))
        hidden = model(torch.tensor(new), positions, attend)
        cache.advance(len(new))
        new = model.logits(hidden[-1:]).argmax(-1).tolist()
        answer += new
    return answer


@pytest.mark.model
def test_the_engine_does_not_keep_the_vocabularys_lists() -> None:
    checkpoint = open_checkpoint(default_model())
    without = checkpoint.without_vocabulary()
    assert checkpoint.gguf_metadata is not None
    assert without.gguf_metadata is not None
    sizes = [len(each) for each in without.gguf_metadata.values() if hasattr(each, "__len__")]
    assert max(sizes) < 10_000, "a chat template is the longest"
    left_out = checkpoint.gguf_metadata.keys() - without.gguf_metadata.keys()
    assert left_out == {f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "merges")}
    assert (without.form, without.tensors) == (checkpoint.form, checkpoint.tensors)


@pytest.mark.model
@torch.inference_mode()
def test_the_default_model_as_shards_of_safetensors_gives_the_same_tokens(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(default_model())
    tensors = {name: each.dequantize() for name, each in checkpoint.tensors.items()}
    save_torch_state_dict(tensors, tmp_path, max_shard_size="150MB")
    del tensors
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    config.save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) >= 3
    sharded = open_checkpoint(tmp_path)
    assert sharded.config == checkpoint.config

    prompt = [504, 3575, 282, 4649, 314]  # The capital of France is
    expected = greedy(checkpoint, prompt, 8)
    assert len(set(expected)) > 3
    assert greedy(sharded, prompt, 8) == expected

    theirs = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    both = theirs(torch.tensor([prompt + expected])).logits[0].argmax(-1)
    assert both[len(prompt) - 1 : -1].tolist() == expected


# --- errors name what is wrong with a file ----------------------------------------------------

FLOATS = np.arange(8, dtype="<f4").tobytes()
W, V = Part("w", (8,), FLOATS), Part("v", (8,), FLOATS)
NAME = text("llama")


def gguf_with(*pairs: tuple[str, Value], parts: tuple[Part, ...] = (W, V), **lies: Any) -> bytes:
    return bytes(raw_gguf([("general.architecture", NAME), *pairs], parts, **lies).data)


GOOD = gguf_with(("k.strings", Value(Kind.STRING, ["one", "two"], is_array=True)))


def aligned(value: Value) -> bytes:
    return gguf_with(("general.alignment", value))


def claims(kind: GGUFValueType, count: int) -> bytes:
    return gguf_with(("k", Value(kind, [], is_array=True, count=count)))


def huge_string(length: int) -> bytes:
    raw = bytearray(gguf_with(("k", text("x" * 9))))
    at = raw.index(b"x" * 9)
    raw[at - 8 : at] = struct.pack("<Q", length)
    return bytes(raw)


def untyped(type_id: int) -> bytes:
    raw = bytearray(gguf_with(("k.k", uint32(77))))
    at = raw.index(b"k.k") + 3
    raw[at : at + 4] = struct.pack("<I", type_id)
    return bytes(raw)


# The broken file, and a part of its error message. Those of UnsupportedError follow separately.
BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "has 0 bytes, but a header"),
    "shorter than a header": (GOOD[:23], "has 23 bytes, but a header"),
    "another magic": (b"GGML" + GOOD[4:], r"begins with b'GGML', not b'GGUF'"),
    "2^64 - 1 tensors": (gguf_with(num_tensors=2**64 - 1), "claims 18446744073709551615 tensors"),
    "2^64 - 1 keys": (gguf_with(num_pairs=2**64 - 1), "claims 18446744073709551615 key/values"),
    "more tensors than fit": (gguf_with(num_tensors=100), "claims 100 tensors, but has only"),
    "more keys than there are": (gguf_with(num_pairs=4), "llama.gguf.*(claims|type|UTF-8|name)"),
    "more tensors than there are": (gguf_with(num_tensors=3), "llama.gguf"),
    "string of 2^60 bytes": (huge_string(2**60), "k claims 1152921504606846976 bytes"),
    "string of 2^64 - 1 bytes": (huge_string(2**64 - 1), "k claims 18446744073709551615 bytes"),
    "string beyond the end": (huge_string(400), "k claims 400 bytes"),
    "key of 65,536 bytes": (gguf_with(("k" * 65_536, uint32(1))), "a key claims 65536 bytes"),
    "array of 2^62 numbers": (claims(Kind.UINT32, 2**62), "claims 4611686018427387904 numbers in"),
    "array of 2^64 - 1 bools": (claims(Kind.BOOL, 2**64 - 1), "claims .* numbers in k"),
    "array of 2^62 strings": (claims(Kind.STRING, 2**62), "claims .* strings in k"),
    "value of unknown type": (untyped(13), "k.k has the unknown type 13"),
    "value of type 2^32 - 1": (untyped(2**32 - 1), "k.k has the unknown type 4294967295"),
    "text that is not UTF-8": (gguf_with(("k", text(b"\xff\xfe"))), "k at byte .* is not UTF-8"),
    "name that is not UTF-8": (GOOD.replace(b"k.s", b"k\xff."), "a key at byte .* is not UTF-8"),
    "key with a line break": (gguf_with(("a\nb", uint32(1))), r"'a\\nb' is not a printable name"),
    "key without letters": (gguf_with(("", uint32(1))), "'' is not a printable name"),
    "tensor with an escape": (
        gguf_with(parts=(replace(W, name="\33[2J"),)),
        "is not a printable name",
    ),
    "key twice": (gguf_with(("k", uint32(1)), ("k", uint32(1))), "the key k twice"),
    "tensor twice": (gguf_with(parts=(W, W)), "the tensor w twice"),
    "tensor without sizes": (gguf_with(parts=(replace(W, sizes=()),)), "w has 0 dimensions"),
    "tensor of 5 sizes": (gguf_with(parts=(replace(W, sizes=(1,) * 5),)), "w has 5 dimensions"),
    "tensor of 3 sizes": (gguf_with(parts=(replace(W, sizes=(2, 2, 2)),)), r"shape \(2, 2, 2\)"),
    "tensor of no numbers": (gguf_with(parts=(replace(W, sizes=(0, 8)),)), r"w has the shape"),
    "tensor of 2^64 - 1 rows": (
        gguf_with(parts=(replace(W, sizes=(8, 2**64 - 1)),)),
        "cut short or its header is wrong: w should end at byte",
    ),
    "sizes that overflow to none": (
        gguf_with(parts=(replace(W, sizes=(2**32, 2**32)),)),
        "cut short or its header is wrong: w",
    ),
    "rows that are no whole blocks": (
        gguf_with(parts=(replace(W, sizes=(31,), kind=GGMLQuantizationType.Q4_0),)),
        "w has rows of 31 numbers, but Q4_0 stores blocks of 32",
    ),
    "overlapping tensors": (gguf_with(parts=(W, replace(V, offset=0))), "v overlaps w"),
    "unaligned offset": (gguf_with(parts=(W, replace(V, offset=33))), "v starts at 33"),
    "offset beyond the end": (gguf_with(parts=(W, replace(V, offset=2**40))), "v should end"),
    "offset that overflows": (gguf_with(parts=(W, replace(V, offset=2**64 - 32))), "v should end"),
    "alignment 0": (aligned(uint32(0)), "general.alignment must be a multiple of 8, not 0"),
    "alignment 3": (aligned(uint32(3)), "general.alignment must be a multiple of 8, not 3"),
    "alignment 2^31": (aligned(uint32(2**31)), "general.alignment must be"),
    "negative alignment": (aligned(Value(Kind.INT32, -32)), "general.alignment must be"),
    "alignment 32.0": (aligned(Value(Kind.FLOAT32, 32.0)), "general.alignment must be"),
    "alignment true": (aligned(Value(Kind.BOOL, True)), "general.alignment must be"),
    "alignment as text": (aligned(text("32")), "general.alignment must be"),
    "alignment as array": (
        aligned(Value(Kind.UINT32, [32] * 5000, is_array=True)),
        "general.alignment must be",
    ),
}

UNSUPPORTED: dict[str, tuple[bytes, str]] = {
    "version 1": (gguf_with(version=1), "GGUF version 1; minigen reads versions 2 and 3"),
    "version 99": (gguf_with(version=99), "GGUF version 99; minigen reads"),
    "big-endian": (gguf_with(version=3 << 24), r"\(a big-endian file\)"),
    "array of arrays": (claims(Kind.ARRAY, 1), "k is an array of arrays"),
    "unknown tensor type": (gguf_with(parts=(replace(W, kind=999),)), "w is stored as type 999"),
    **{
        f"{kind} tensor": (
            gguf_with(parts=(replace(W, kind=GGMLQuantizationType[kind]),)),
            f"w is stored as {kind}; minigen reads F32, F16",
        )
        for kind in ("Q8_1", "Q8_K", "IQ2_XXS", "IQ3_S", "IQ1_S", "F64", "I32")
    },
}


def refusal(path: Path, raw: bytes) -> MinigenError:
    path.write_bytes(raw)
    with pytest.raises(MinigenError) as error:
        open_checkpoint(path)
    message = str(error.value)
    assert message.startswith(str(path))
    assert message.isprintable()
    assert len(message) < 500
    return error.value


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_refused_by_name(what: str, tmp_path: Path) -> None:
    raw, words = BROKEN[what]
    error = refusal(tmp_path / "llama.gguf", raw)
    assert type(error) is FileFormatError
    assert re.search(words, str(error)), error


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_a_file_that_minigen_does_not_read_is_refused_by_name(what: str, tmp_path: Path) -> None:
    raw, words = UNSUPPORTED[what]
    error = refusal(tmp_path / "llama.gguf", raw)
    assert type(error) is UnsupportedError
    assert re.search(words, str(error)), error


def test_the_file_that_the_broken_ones_are_made_from_is_sound(tmp_path: Path) -> None:
    path = tmp_path / "good.gguf"
    path.write_bytes(GOOD)
    assert set(read_gguf(path).tensors) == {"w", "v"}


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    only_values = raw_gguf(list(VALUES.items()), alignment=1).data
    for good in (GOOD, only_values):
        path.write_bytes(good)
        read_gguf(path)
        for length in range(len(good)):
            path.write_bytes(good[:length])
            with pytest.raises(FileFormatError, match=r"cut.gguf"):
                read_gguf(path)


def test_a_directory_or_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="is not a regular file"):
        read_gguf(tmp_path)
    with pytest.raises(FileFormatError, match=r"config.json is missing"):
        open_checkpoint(tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"none.gguf does not exist"):
        open_checkpoint(tmp_path / "none.gguf")


def test_a_file_that_cannot_be_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: Any, **__: Any) -> None:
        raise RuntimeError("unable to open file <x>: Permission denied (13)\nstack")

    path = tmp_path / "x.gguf"
    path.write_bytes(GOOD)
    monkeypatch.setattr(torch, "from_file", denied)
    with pytest.raises(FileFormatError, match=r"x.gguf cannot be mapped: .*Permission denied"):
        read_gguf(path)


# --- errors name what is wrong with a model ---------------------------------------------------


MODEL_COMPLAINTS: dict[str, tuple[dict[str, Any], type[MinigenError], str]] = {
    "another architecture": ({"general.architecture": "gemma"}, UnsupportedError, "'gemma' is not"),
    "architecture as array": (
        {"general.architecture": Value(Kind.INT32, [1, 2], is_array=True)},
        UnsupportedError,
        r"architecture \[1, 2\] is not",
    ),
    "a key of another model": (
        {"llama.expert_count": 8, "llama.rope.scale_linear": 2.0},
        UnsupportedError,
        "does not support llama.expert_count, llama.rope.scale_linear",
    ),
    "no layers": ({"llama.block_count": None}, ConfigError, "num_hidden_layers is missing"),
    "no length": ({"llama.context_length": None}, ConfigError, "max_position_embeddings is miss"),
    "no epsilon": (
        {"llama.attention.layer_norm_rms_epsilon": None},
        ConfigError,
        "llama.attention.layer_norm_rms_epsilon is missing",
    ),
    "heads as text": ({"llama.attention.head_count": "6"}, ConfigError, "num_attention_heads must"),
    "heads as list": (
        {"llama.attention.head_count_kv": Value(Kind.UINT32, [2] * 2000, is_array=True)},
        ConfigError,
        r"num_key_value_heads must be a whole number .* not \[2, 2",
    ),
    "negative width": (
        {"llama.embedding_length": Value(Kind.INT32, -48)},
        ConfigError,
        "hidden_size must be a whole number from 1",
    ),
    "base of nothing": ({"llama.rope.freq_base": 0.0}, ConfigError, "rope_theta must be a positiv"),
    "base NaN": ({"llama.rope.freq_base": math.nan}, ConfigError, "rope_theta must be a positive"),
    "base as list": (
        {"llama.rope.freq_base": Value(Kind.FLOAT32, [1.0, 2.0], is_array=True)},
        ConfigError,
        "rope_theta must be a positive",
    ),
    "half-turned heads": (
        {"llama.rope.dimension_count": 4},
        UnsupportedError,
        "rope.dimension_count is 4, but minigen rotates and caches whole heads of 8",
    ),
    "heads as list of sizes": (
        {"llama.rope.dimension_count": Value(Kind.UINT32, [8, 8], is_array=True)},
        UnsupportedError,
        "rope.dimension_count is",
    ),
    "yarn": (
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0},
        UnsupportedError,
        "rope type 'yarn' is not supported",
    ),
    "scaling type as list": (
        {"llama.rope.scaling.type": Value(Kind.UINT8, [1, 2], is_array=True)},
        UnsupportedError,
        r"rope type \[1, 2\] is not supported",
    ),
    "scaling without factor": ({"llama.rope.scaling.type": "linear"}, ConfigError, "factor is mis"),
    "louder attention": (
        {"llama.rope.scaling.attn_factor": 1.5},
        UnsupportedError,
        "rope.scaling.attn_factor is 1.5",
    ),
    "another vocabulary": (
        {"llama.vocab_size": 200},
        WeightsError,
        r"embed_tokens.weight expected \(200, 48\), found \(211, 48\)",
    ),
    "one layer more": ({"llama.block_count": 4}, WeightsError, r"9 missing: model.layers.3.input"),
    "one layer less": ({"llama.block_count": 2}, WeightsError, r"9 unexpected: model.layers.2"),
    "end beyond the vocabulary": (
        {"tokenizer.ggml.eos_token_id": 211},
        ConfigError,
        "eos_token_id must name tokens below vocab_size 211, not 211",
    ),
    "ends as list": (
        {"tokenizer.ggml.eot_token_id": Value(Kind.UINT32, [3, 4], is_array=True)},
        ConfigError,
        r"eos_token_id must name tokens .* not \[3, 4\]",
    ),
    "ends as list of text": (
        {"tokenizer.ggml.eom_token_id": ["x", "y"]},
        ConfigError,
        "eos_token_id must name tokens",
    ),
}


@pytest.mark.parametrize("what", MODEL_COMPLAINTS)
def test_a_model_that_makes_no_sense_is_refused_by_name(what: str, tmp_path: Path) -> None:
    changes, kind, words = MODEL_COMPLAINTS[what]
    path = tmp_path / "model.gguf"
    write_model(path, make_model("llama"), changes)
    with pytest.raises(kind, match=words) as error:
        open_checkpoint(path)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 1500


def test_a_factor_without_a_type_is_linear_as_in_llama_cpp(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, make_model("llama"), {"llama.rope.scaling.factor": 4.0})
    assert open_checkpoint(path).config.rope_linear_factor == 4
    none = {"llama.rope.scaling.factor": 4.0, "llama.rope.scaling.type": "none"}
    write_model(path, make_model("llama"), none)
    assert open_checkpoint(path).config.rope_linear_factor == 1


def test_every_token_that_ends_a_turn_is_an_end_token(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    ends = {f"tokenizer.ggml.{name}_token_id": n for name, n in (("eot", 7), ("eom", 2))}
    write_model(path, make_model("llama"), ends)
    assert open_checkpoint(path).config.eos_token_ids == (2, 7)


def with_parts(path: Path, extra: Mapping[str, Any], leave_out: Sequence[str] = ()) -> None:
    """Write the tiny Llama again, with other tensors."""
    write_model(path, make_model("llama-biases"))
    reader = gguf.GGUFReader(path)
    fields = {
        key: each.contents()
        for key, each in reader.fields.items()
        if not key.startswith("GGUF.") and key != "general.architecture"
    }
    tensors = {
        each.name: (np.array(each.data), None)
        for each in reader.tensors
        if each.name not in leave_out
    }
    write_gguf(path, "llama", fields, {**tensors, **extra})


def test_tensors_that_the_model_does_not_have_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    two = np.zeros(2, dtype=np.float32)
    extra = {"nodot": two, "..weight": two, "blk.7.attn_q.weight": two, "blk.x.attn_q.bias": two}
    with_parts(path, {name: (data, None) for name, data in extra.items()}, ["blk.1.attn_k.bias"])
    with pytest.raises(WeightsError) as error:
        open_checkpoint(path)
    for words in (
        r"1 missing: model.layers.1.self_attn.k_proj.bias (16,)",
        "4 unexpected: ",
        "nodot (2,)",
        "..weight (2,)",
        "model.layers.7.self_attn.q_proj.weight (2,)",
        "blk.x.attn_q.bias (2,)",
    ):
        assert words in str(error.value)


def test_a_quantised_bias_of_q_is_refused_instead_of_put_in_the_wrong_order(
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.gguf"
    bias = (quantised("Q8_0", 1, 3)[0], GGMLQuantizationType.Q8_0)
    with_parts(path, {"blk.1.attn_q.bias": bias}, ["blk.1.attn_q.bias"])
    with pytest.raises(MinigenError, match=r"layers.1.self_attn.q_proj.bias"):
        open_checkpoint(path)


def test_two_tensors_for_one_place_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    norm = np.zeros(48, dtype=np.float32)
    with_parts(path, {"model.norm.weight": (norm, None)})
    with pytest.raises(WeightsError, match=r"model.norm.weight twice"):
        open_checkpoint(path)


def test_wrong_factors_of_the_frequencies_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with_parts(path, {"rope_freqs.weight": (np.ones(5, dtype=np.float32), None)})
    with pytest.raises(WeightsError, match=r"rope_freqs.weight expected \(4,\), found \(5,\)"):
        open_checkpoint(path)


def test_types_have_the_numbers_of_the_library() -> None:
    assert {each.name: each.value for each in ValueType} == {
        each.name: each.value for each in GGUFValueType
    }
    known = {each.value: each.name for each in GGMLQuantizationType}
    assert {number: TENSOR_TYPES.get(number) for number in known} == known


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT") or sys.platform != "linux", reason="Linux only")
def test_released_pages_leave_the_process_but_not_the_page_cache(tmp_path: Path) -> None:
    path, numbers = tmp_path / "model.gguf", np.random.default_rng(0).random((512, 1024), "f4")
    write_gguf(path, "llama", {}, {"weight": (numbers, None)})
    with path.open("rb+") as written:
        os.fsync(written)  # only pages that are on the disk could be evicted
    file = read_gguf(path)
    tensor = file.tensors["weight"]
    assert np.array_equal(tensor.dequantize().numpy(), numbers)
    assert _mapped_kilobytes(path) >= numbers.nbytes // 1024
    tensor.release_pages()
    assert _mapped_kilobytes(path) < numbers.nbytes // 4096
    with path.open("rb") as reread:
        for offset in range(0, path.stat().st_size, mmap.PAGESIZE):
            page = bytearray(mmap.PAGESIZE)
            try:
                os.preadv(reread.fileno(), [page], offset, os.RWF_NOWAIT)
            except BlockingIOError:
                pytest.fail(f"byte {offset} would be read from the disk")
            except OSError:
                pytest.skip("this file system cannot tell")
    assert np.array_equal(tensor.dequantize().numpy(), numbers)


def _mapped_kilobytes(path: Path) -> int:
    """Return the resident memory of this process that is mapped from a file."""
    _, _, rest = Path("/proc/self/smaps").read_text(encoding="utf-8").partition(str(path))
    return int(rest.partition("Rss:")[2].split()[0])
