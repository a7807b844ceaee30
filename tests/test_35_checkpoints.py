"""Quantised checkpoints are read as their layouts define them, cut, packed, and checked."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from minigen.checkpoint.checkpoint import Checkpoint, open_checkpoint
from minigen.checkpoint.quant_formats import FORMATS
from minigen.checkpoint.quantized.matrix import QuantizedTensor, unpack_bits
from minigen.parallel.sharding import module_of, obstacle, shard_tensors
from tests.quantized_files import SCHEMES, Scheme, gptq, nf4, packed, save, tensors_of, words_of

DOWN = "model.layers.0.mlp.down_proj.weight"
by_scheme = pytest.mark.parametrize("name", SCHEMES)


def opened(folder: Path, scheme: Scheme, ffn: int = 96) -> tuple[Checkpoint, dict[str, Tensor]]:
    """Save and open a checkpoint; return it with the numbers that it should have."""
    tensors, numbers = tensors_of(scheme, ffn=ffn)
    path = save(folder / "model", tensors, scheme.settings, intermediate_size=ffn)
    return open_checkpoint(path), {name: torch.from_numpy(n) for name, n in numbers.items()}


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fill new memory with NaN, so that a number that was never written would show."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@by_scheme
@pytest.mark.usefixtures("poisoned")
def test_every_number_is_what_the_layout_defines(name: str, tmp_path: Path) -> None:
    checkpoint, numbers = opened(tmp_path, SCHEMES[name])
    for tensor_name, expected in numbers.items():
        tensor = checkpoint.tensors[tensor_name]
        assert isinstance(tensor, QuantizedTensor)
        assert tensor.shape == tuple(expected.shape)
        assert tensor.kind in checkpoint.form
        assert torch.equal(tensor.dequantize(), expected)
        assert torch.equal(tensor.dequantize(torch.bfloat16), expected.bfloat16())
    assert checkpoint.tensors["model.norm.weight"].kind == "BF16"


@by_scheme
def test_rows_and_columns_are_cut_without_reading_the_rest(name: str, tmp_path: Path) -> None:
    checkpoint, numbers = opened(tmp_path, SCHEMES[name])
    tensor, expected = checkpoint.tensors[DOWN], numbers[DOWN]
    rows, columns = tensor.shape
    row, column = tensor.row_unit, tensor.column_unit
    assert rows % row == columns % column == 0
    assert torch.equal(tensor.rows(rows - row, rows).dequantize(), expected[rows - row :])
    assert torch.equal(tensor.columns(0, column).dequantize(), expected[:, :column])
    part = tensor.columns(column, columns).rows(row, rows) if row < rows else tensor
    if part is tensor or part.shape[1] <= column:
        return
    assert part.num_bytes < tensor.num_bytes
    assert torch.equal(part.dequantize(), expected[row:, column:])
    again = part.rows(0, row).columns(column, part.shape[1])
    assert torch.equal(again.dequantize(), expected[row : 2 * row, 2 * column :])


def test_a_cut_inside_a_group_or_outside_the_matrix_is_refused(tmp_path: Path) -> None:
    checkpoint, _ = opened(tmp_path, SCHEMES["gptq 4 v1"])
    tensor = checkpoint.tensors[DOWN]
    with pytest.raises(IndexError, match="cut into columns at multiples of 32 only"):
        tensor.columns(16, 32)
    with pytest.raises(IndexError, match="cut into rows at multiples of 8 only"):
        tensor.rows(0, 12)
    with pytest.raises(IndexError, match="has columns 0 to 96, not 64 to 128"):
        tensor.columns(64, 128)


def test_many_rows_are_read_in_chunks_into_memory_that_exists(tmp_path: Path) -> None:
    checkpoint, numbers = opened(tmp_path, packed(3, 32, symmetric=False), ffn=1120)
    name = "model.layers.0.mlp.up_proj.weight"
    tensor, expected = checkpoint.tensors[name], numbers[name]
    fused = torch.full((1130, 64), 7.0)
    assert tensor.dequantize(out=fused[5:1125]).data_ptr() == fused[5].data_ptr()
    assert torch.equal(fused[5:1125], expected)
    assert (fused[:5] == 7).all()
    assert (fused[1125:] == 7).all()
    tensor.release_pages()
    assert torch.equal(tensor.dequantize(), expected)


@by_scheme
def test_ranks_hold_parts_that_make_up_the_whole(name: str, tmp_path: Path) -> None:
    checkpoint, numbers = opened(tmp_path, SCHEMES[name], ffn=128)
    found = obstacle(checkpoint.config, checkpoint.tensors, "float32", 2)
    if checkpoint.tensors[DOWN].row_unit == 32:  # zero points of 3 bits, 32 rows to 3 words
        key = "self_attn.k_proj would be cut into 16 outputs, which is not a multiple of 32"
        assert found == key
        return
    assert found is None
    shares = [shard_tensors(checkpoint.tensors, checkpoint.config, rank, 2) for rank in range(2)]
    for tensor_name, expected in numbers.items():
        parts = [share[tensor_name].dequantize() for share in shares]
        axis = 1 if module_of(tensor_name).endswith(("o_proj", "down_proj")) else 0
        assert torch.equal(torch.cat(parts, dim=axis), expected)


def test_a_group_that_two_ranks_would_share_is_named(tmp_path: Path) -> None:
    checkpoint, _ = opened(tmp_path, packed(4, 32, symmetric=True))
    found = obstacle(checkpoint.config, checkpoint.tensors, "float32", 2)
    assert found == (
        "mlp.down_proj would be cut into 48 inputs, within a group of 32 that share a scale"
    )


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 100])
def test_codes_of_any_width_are_unpacked(bits: int, count: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, count))
    words = torch.tensor([words_of(row, bits) for row in codes.tolist()], dtype=torch.int32)
    assert unpack_bits(words, bits, count).tolist() == codes.tolist()


def test_the_zero_points_of_both_versions_are_the_same(tmp_path: Path) -> None:
    for bits in (2, 3, 4, 8):
        found = []
        for version in (1, 2):
            scheme = gptq(bits, 32, version, symmetric=False)
            tensors, _ = tensors_of(scheme)
            checkpoint = open_checkpoint(save(tmp_path / f"{bits}", tensors, scheme.settings))
            integers = checkpoint.tensors[DOWN].integers()
            assert integers is not None
            found.append(integers.zeros)
        # Random codes of 8 bits have no zero point of 0, which version 1 stores as minus one.
        assert (found[0] == 0).any() or bits == 8
        assert torch.equal(*found)


def test_headers_alone_describe_a_quantised_checkpoint(tmp_path: Path) -> None:
    """`minigen info` reads only the headers of the files that a hub has."""
    for name, scheme in SCHEMES.items():
        tensors, _ = tensors_of(scheme)
        path = save(tmp_path / name, tensors, scheme.settings)
        whole, file = open_checkpoint(path), path / "model.safetensors"
        sizes, raw = {file.name: file.stat().st_size}, file.read_bytes()
        file.write_bytes(raw[: 8 + int.from_bytes(raw[:8], "little")])
        described = open_checkpoint(path, sizes)
        assert described.form.replace(" by g_idx", "") == whole.form.replace(" by g_idx", "")
        assert {n: t.shape for n, t in described.tensors.items()} == {
            n: t.shape for n, t in whole.tensors.items()
        }


def test_zero_biases_that_the_model_lacks_are_left_out(tmp_path: Path) -> None:
    scheme = SCHEMES["gptq 4 v1"]
    tensors, _ = tensors_of(scheme)
    tensors["model.layers.0.mlp.up_proj.bias"] = torch.zeros(96, dtype=torch.float16)
    checkpoint = open_checkpoint(save(tmp_path, tensors, scheme.settings))
    assert "model.layers.0.mlp.up_proj.bias" not in checkpoint.tensors


def test_double_quantisation_counts_blocks_over_the_whole_matrix(tmp_path: Path) -> None:
    checkpoint, numbers = opened(tmp_path, nf4(double=True, size=16), ffn=128)
    tensor = checkpoint.tensors[DOWN]
    part = tensor.rows(40, 60).columns(16, 96)  # 8 groups per row, so block 1 begins in row 32
    assert torch.equal(part.dequantize(), numbers[DOWN][40:60, 16:96])


def test_the_documents_name_every_form_that_is_read() -> None:
    text = (Path(__file__).parents[1] / "docs" / "get-started.md").read_text(encoding="utf-8")
    methods = {scheme.settings["quant_method"] for scheme in SCHEMES.values()}
    assert [name for name in (*FORMATS, *methods) if name not in text] == []
