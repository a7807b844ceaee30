"""Any change of a quantised checkpoint is read, in every way alike, or refused in one sentence.

The changes are seeded: settings of `config.json`, sizes of the model, the header and the bytes of
the tensors, whole tensors, bitsandbytes' JSON, and, in GGUF, the header and the blocks of each
kind. What is read must be the same whole, in parts, and by its codes, because the ranks of tensor
parallelism and the kernels read it so.
"""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from minigen.checkpoint.checkpoint import Checkpoint, open_checkpoint
from minigen.checkpoint.gguf import read_gguf
from minigen.checkpoint.quant_formats import FORMATS
from minigen.checkpoint.quantized.matrix import Groups, QuantizedTensor, scaled
from tests.gguf_files import Part, raw_gguf
from tests.quantized_files import CONFIG, SCHEMES, save, tensors_of
from tests.test_11_fuzz import (
    EXTREMES,
    SOUND,
    TOKENS,
    edited,
    edits_of,
    json_values,
    outcome,
    read_tensor,
    replaced,
    tried,
)

NAMES = sorted(SCHEMES)
FILE = "model.safetensors"
VALUES = st.one_of(
    json_values,
    st.sampled_from([*EXTREMES, -1, "gptq", "gptq_v2", "gemm", [16, 16], ["Linear"], ["re:.*"]]),
)
GROUP_KEYS = (
    "num_bits type symmetric strategy group_size block_structure dynamic targets format weights"
)
STATE_KEYS = "quant_type blocksize shape dtype nested_blocksize nested_dtype nested_offset".split()
SIZES = [key for key, value in CONFIG.items() if type(value) is int and "token" not in key]
STATE = ".weight.quant_state.bitsandbytes__nf4"


def saved(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Save a sound checkpoint of each scheme; return their tensors."""
    written = {}
    for name in NAMES:
        written[name], _ = tensors_of(SCHEMES[name])
        save(folder / name, written[name], SCHEMES[name].settings)
    return written


def read_every_way(path: Path) -> None:
    """Read a checkpoint whole, in parts, by its codes and by its header: they must agree."""
    checkpoint = open_checkpoint(path)
    for tensor in checkpoint.tensors.values():
        if isinstance(tensor, QuantizedTensor):
            compare_parts(tensor, tensor.dequantize())
        else:
            read_tensor(tensor)
    described = described_by_header(path)
    assert {n: t.shape for n, t in described.tensors.items()} == {
        n: t.shape for n, t in checkpoint.tensors.items()
    }


def compare_parts(tensor: QuantizedTensor, numbers: Tensor) -> None:
    """Compare a quantised matrix with its upper rows, its left columns, and its codes."""
    rows, columns = tensor.shape
    row = rows // 2 // tensor.row_unit * tensor.row_unit
    column = columns // 2 // tensor.column_unit * tensor.column_unit
    if row:
        assert torch.equal(tensor.rows(0, row).dequantize(), numbers[:row])
        assert torch.equal(tensor.rows(row, rows).dequantize(), numbers[row:])
    if column:
        assert torch.equal(tensor.columns(column, columns).dequantize(), numbers[:, column:])
    integers = tensor.integers()
    if integers is not None:
        codes = integers.read()
        assert int(codes.max()) < 2**integers.bits
        groups = Groups(integers.group_size, integers.scales.shape[1])
        found = scaled(codes, integers.scales, integers.zeros, groups)
        torch.testing.assert_close(found, numbers, rtol=0, atol=1e-37)  # halved subnormal scales


def described_by_header(path: Path) -> Checkpoint:
    """Open a checkpoint of which only the header is there, as `minigen info` does."""
    file, raw = path / FILE, (path / FILE).read_bytes()
    file.write_bytes(raw[: 8 + int.from_bytes(raw[:8], "little")])
    try:
        return open_checkpoint(path, {FILE: len(raw)})
    finally:
        file.write_bytes(raw)


def fuzz_settings(folder: Path, examples: int) -> Counter[str]:
    """Read checkpoints with a few changed settings and sizes."""
    saved(folder)

    def attempt(example: tuple[str, dict[float, Any], dict[str, Any], dict[str, int]]) -> None:
        name, changes, inner, sizes = example
        keys = sorted(SCHEMES[name].settings)
        changed = {keys[int(place * len(keys))]: value for place, value in changes.items()}
        settings = json.loads(json.dumps({**SCHEMES[name].settings, **changed}))
        groups = settings.get("config_groups")
        if isinstance(groups, dict) and isinstance(groups.get("group_0"), dict):
            group = groups["group_0"]
            for key, value in inner.items():
                (group if key in group else group["weights"])[key] = value
                if not isinstance(group["weights"], dict):
                    break
        config = {**CONFIG, **sizes, "quantization_config": settings}
        (folder / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
        read_every_way(folder / name)

    sizes = st.dictionaries(st.sampled_from(SIZES), st.sampled_from(EXTREMES), max_size=1)
    examples_of = st.tuples(
        st.sampled_from(NAMES),
        st.dictionaries(st.floats(0, 1, exclude_max=True), VALUES, max_size=2),
        st.dictionaries(st.sampled_from(GROUP_KEYS.split()), VALUES, max_size=2),
        st.one_of(st.just({}), sizes),
    )
    return tried(examples_of, attempt, examples)


def fuzz_bytes(folder: Path, examples: int) -> Counter[str]:
    """Read checkpoints in which bytes of the tensors, or tokens of the header, are changed."""
    saved(folder)
    raws = {name: (folder / name / FILE).read_bytes() for name in NAMES}
    dtypes = ["I64", "I32", "I16", "I8", "U8", "BOOL", "F64", "F8_E5M2", "F8_E8M0", "C64", "F4"]
    tokens = [*TOKENS, *(f'"{dtype}"' for dtype in dtypes)]

    def attempt(example: tuple[str, list[tuple[float, int]], list[tuple[float, str]]]) -> None:
        name, changes, edits = example
        size = 8 + int.from_bytes(raws[name][:8], "little")
        header, data = raws[name][8:size].decode(), bytearray(raws[name][size:])
        for place, byte in changes:
            data[int(place * len(data))] = byte
        for place, token in edits:
            spans = [match.span() for match in re.finditer(r'\d+|"[A-Z]\w+"|\[[^]]*\]', header)]
            start, stop = spans[int(place * len(spans))]
            header = header[:start] + token + header[stop:]
        raw = header.encode()
        (folder / name / FILE).write_bytes(len(raw).to_bytes(8, "little") + raw + data)
        read_every_way(folder / name)

    places = st.floats(0, 1, exclude_max=True)
    changes = st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=4)
    edits = st.lists(st.tuples(places, st.sampled_from(tokens)), max_size=2)
    return tried(st.tuples(st.sampled_from(NAMES), changes, edits), attempt, examples)


def flat_as(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return a change that takes a tensor's bytes for another dtype, as far as they go."""

    def change(tensor: Tensor) -> Tensor:
        raw = tensor.reshape(-1).view(torch.uint8)
        return raw[: len(raw) // dtype.itemsize * dtype.itemsize].clone().view(dtype)

    return change


def filled_with(value: float) -> Callable[[Tensor], Tensor]:
    """Return a change of every third number; whole numbers wrap."""

    def change(tensor: Tensor) -> Tensor:
        changed = tensor.clone().reshape(-1)
        changed[::3] = torch.tensor(value).to(tensor.dtype)
        return changed.reshape(tensor.shape)

    return change


# What can happen to one tensor; None takes it away.
SPECIAL = (0.0, -1.0, 255.0, -8.0, 2.0**31, 1e-40, 3e38, float("nan"), float("inf"))
DTYPES = (torch.int32, torch.int8, torch.uint8, torch.float16, torch.bfloat16, torch.float64)
CHANGES: list[Callable[[Tensor], Tensor] | None] = [
    None,
    *map(filled_with, SPECIAL),
    *map(flat_as, (*DTYPES, torch.float8_e4m3fn, torch.complex64)),
    *(lambda tensor, dtype=dtype: tensor.to(dtype) for dtype in DTYPES),
    lambda tensor: tensor[:-1],
    lambda tensor: torch.cat([tensor, tensor]),
    lambda tensor: tensor.T if tensor.dim() == 2 else tensor.reshape(1, -1),
    lambda tensor: tensor.reshape(-1),
    lambda tensor: tensor.reshape(-1)[0],
    lambda tensor: tensor.reshape(-1)[:0],
    lambda tensor: (
        tensor.reshape(-1).view(torch.uint8).flip(0).view(tensor.dtype).reshape(tensor.shape)
    ),
]


def fuzz_tensors(folder: Path, examples: int) -> Counter[str]:
    """Read checkpoints in which tensors are lost, renamed, of other types, shapes and numbers."""
    written = saved(folder)

    def attempt(example: tuple[str, list[tuple[float, int]], float, bool, dict[str, Any]]) -> None:
        name, changes, other, renamed, state = example
        tensors = dict(written[name])
        for place, index in changes:
            chosen, change = sorted(tensors)[int(place * len(tensors))], CHANGES[index]
            tensor = tensors.pop(chosen)
            target = sorted(tensors)[int(other * len(tensors))] if renamed else chosen
            if change is not None and tensor.numel() and not tensor.is_complex():
                tensors[target] = change(torch.atleast_1d(tensor)).contiguous()
        for key in [key for key in tensors if key.endswith(STATE)][: len(state)]:
            text = json.dumps({**json.loads(bytes(written[name][key].tolist())), **state})
            tensors[key] = torch.tensor(list(text.encode()), dtype=torch.uint8)
        save_file(tensors, folder / name / FILE)
        read_every_way(folder / name)

    places = st.floats(0, 1, exclude_max=True)
    changes = st.lists(st.tuples(places, st.integers(0, len(CHANGES) - 1)), max_size=3)
    numbers = st.sampled_from([10**400, -(10**400), 1e30, 16, 32, 64, [64, 64], "nf4"])
    states = st.dictionaries(st.sampled_from(STATE_KEYS), VALUES | numbers, max_size=2)
    strategy = st.tuples(
        st.sampled_from(NAMES), changes, places, st.sampled_from([False] * 4 + [True]), states
    )
    return tried(strategy, attempt, examples)


def fuzz_kinds(folder: Path, examples: int) -> Counter[str]:
    """Read GGUF files of every kind with other blocks, and with changed bytes of the header."""
    path, kinds = folder / "model.gguf", sorted(FORMATS)
    files = {}
    for kind in kinds:
        form = FORMATS[kind]
        rows = bytes(range(256)) * (4 * form.block_bytes)
        parts = [
            Part(
                f"{kind}.{i}",
                (2 * form.block_size, 3),
                rows[i : i + 6 * form.block_bytes],
                GGMLQuantizationType[kind],
            )
            for i in range(2)
        ]
        files[kind] = raw_gguf([], parts)

    def attempt(example: tuple[str, list[tuple[float, int]], list[Any], bytes]) -> None:
        kind, numbers, edits, blocks = example
        file = files[kind]
        data = bytes(file.data)
        data = data[: len(data) - len(blocks)] + blocks
        for place, value in numbers:
            at, width = file.numbers[int(place * len(file.numbers))]
            data = replaced(data, at, width, value)
        path.write_bytes(edited(data, edits))
        for tensor in read_gguf(path).tensors.values():
            read_tensor(tensor)
            if len(tensor.shape) == 2:
                block, whole = tensor.column_unit, tensor.dequantize()
                part = tensor.columns(tensor.shape[1] - block, tensor.shape[1]).rows(0, 1)
                assert torch.equal(part.dequantize().nan_to_num(), whole[:1, -block:].nan_to_num())

    places = st.floats(0, 1, exclude_max=True)
    numbers = st.lists(st.tuples(places, st.sampled_from(EXTREMES)), max_size=2)
    edits = st.one_of(st.just([]), edits_of(160))
    strategy = st.tuples(st.sampled_from(kinds), numbers, edits, st.binary(max_size=80))
    return tried(strategy, attempt, examples)


# The number of examples that each tries, briefly and at length.
FUZZERS: dict[str, tuple[Callable[[Path, int], Counter[str]], int, int]] = {
    "settings": (fuzz_settings, 120, 10_000),
    "bytes": (fuzz_bytes, 120, 10_000),
    "tensors": (fuzz_tensors, 120, 10_000),
    "kinds of GGUF": (fuzz_kinds, 400, 20_000),
}


@pytest.mark.parametrize("what", FUZZERS)
def test_any_change_is_read_alike_or_refused(what: str, tmp_path: Path) -> None:
    fuzz, examples, _ = FUZZERS[what]
    outcomes = fuzz(tmp_path, examples)
    assert outcomes[SOUND]
    assert len(outcomes) > 1
    assert outcome(lambda: None) == SOUND


@pytest.mark.long
@pytest.mark.parametrize("what", FUZZERS)
def test_any_change_at_length(what: str, tmp_path: Path) -> None:
    fuzz, _, examples = FUZZERS[what]
    assert fuzz(tmp_path, examples)[SOUND]
