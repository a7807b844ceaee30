"""Writes a GGUF file tensor by tensor, so that the memory holds one tensor at a time.

The `gguf` library writes the bytes. Names and the order of rows are those of llama.cpp: for the
Llama architecture it expects the rows of Q and K so that the two halves of each rotated pair are
neighbours (`minigen.checkpoint.gguf_mapping`).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType, GGUFValueType, LlamaFileType
from jaxtyping import Shaped, UInt8
from torch import Tensor

from minigen.checkpoint.checkpoint import Checkpoint
from minigen.checkpoint.gguf_mapping import gguf_name, unpermuted_rows
from minigen.checkpoint.model_config import ModelConfig
from minigen.export.gguf_blocks import quantize_rows
from minigen.export.gguf_metadata import (
    Metadata,
    TypedValue,
    metadata_of_directory,
    metadata_of_gguf,
    rope_divisors,
)
from minigen.export.partial import PartialOutput
from minigen.export.pieces import naming
from minigen.export.plan import Plan, is_stored_as

_QUANTIZATION_VERSION = 2
_FILE_TYPES = {
    "F32": LlamaFileType.ALL_F32,
    "Q3_K": LlamaFileType.MOSTLY_Q3_K_S,
    "Q4_K": LlamaFileType.MOSTLY_Q4_K_S,
    "Q5_K": LlamaFileType.MOSTLY_Q5_K_S,
    "MXFP4": LlamaFileType.MOSTLY_MXFP4_MOE,
}


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor to be written: its name and shape in the file, its kind, and how to get its bytes.

    `rows` returns the bytes in the order of the file; it is called once, when they are written.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    num_bytes: int
    rows: Callable[[], UInt8[Tensor, "rows row_bytes"]]


def write_gguf(path: Path, metadata: Metadata, tensors: Sequence[GGUFTensor]) -> None:
    """Write a GGUF file, version 3, with these keys and tensors in this order."""
    writer = gguf.GGUFWriter(path, str(metadata["general.architecture"].value))
    for key, typed in metadata.items():
        if key == "general.alignment":
            writer.add_custom_alignment(typed.value)
        elif key != "general.architecture":  # the writer has added it
            writer.add_key_value(key, typed.value, typed.kind, typed.element)
    for each in tensors:
        kind = GGMLQuantizationType[each.kind]
        writer.add_tensor_info(each.name, each.shape, np.dtype(np.float32), each.num_bytes, kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for each in tensors:
            writer.write_tensor_data(each.rows().contiguous().numpy())
    finally:
        writer.close()


class GGUFOutput:
    """Writes a model's pieces, and the tensors that stay as they are, as one GGUF file.

    Raises `MinigenError`s for a source whose configuration or tokenizer GGUF has no keys for.
    """

    def __init__(self, checkpoint: Checkpoint, plan: Plan) -> None:
        self._checkpoint, self._plan = checkpoint, plan
        if checkpoint.gguf_metadata is None:
            metadata = metadata_of_directory(checkpoint)
        else:
            metadata = metadata_of_gguf(checkpoint.path)
        kinds = Counter(
            plan.kinds[name] for name, each in checkpoint.tensors.items() if len(each.shape) == 2
        )
        self._metadata = _with_file_type(metadata, kinds.most_common(1)[0][0])

    def estimated_bytes(self, names: Iterable[str]) -> int:
        """Return the size that these tensors have in the file."""
        return sum(self._num_bytes(name, self._checkpoint.tensors[name].shape) for name in names)

    def write(self, path: Path, partial: PartialOutput) -> None:
        """Write the file, with the pieces that `partial` has."""
        checkpoint, config = self._checkpoint, self._checkpoint.config
        tensors = [self._tensor(name, partial) for name in checkpoint.tensors]
        if config.rope_scaling is not None:
            divisors = rope_divisors(config, config.rope_scaling)
            raw = divisors.view(torch.uint8)
            tensors.append(
                GGUFTensor("rope_freqs.weight", "F32", tuple(divisors.shape), len(raw), lambda: raw)
            )
        write_gguf(path, self._metadata, tensors)

    def _num_bytes(self, name: str, shape: tuple[int, ...]) -> int:
        size, block_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[self._plan.kinds[name]]]
        return math.prod(shape) // size * block_bytes

    def _tensor(self, name: str, partial: PartialOutput) -> GGUFTensor:
        stored, kind = self._checkpoint.tensors[name], self._plan.kinds[name]

        def rows() -> UInt8[Tensor, "rows row_bytes"]:
            if partial.may_have(name):
                tensors = partial.get(name).tensors
                if "blocks" in tensors:
                    return rows_in_file(name, tensors["blocks"], self._checkpoint.config)
                (changed,) = tensors.values()
                raw = changed.view(torch.uint8).unflatten(0, (len(changed), -1))
            elif is_stored_as(self._checkpoint, name, kind) and len(stored.shape) == 2:
                raw = stored.data if stored.row_order is None else stored.data[stored.row_order]
            else:
                numbers = stored.dequantize()
                column = numbers if numbers.dim() == 2 else numbers.unsqueeze(-1)
                with naming(name):
                    raw = quantize_rows(column, kind)
            return rows_in_file(name, raw, self._checkpoint.config)

        num_bytes = self._num_bytes(name, stored.shape)
        return GGUFTensor(gguf_name(name), kind, stored.shape, num_bytes, rows)


def _with_file_type(metadata: Metadata, kind: str) -> Metadata:
    """Return the metadata with the keys that say what most tensors of the file are stored as."""
    file_type = _FILE_TYPES.get(kind) or LlamaFileType[f"MOSTLY_{kind}"]
    own = {
        "general.file_type": int(file_type),
        "general.quantization_version": _QUANTIZATION_VERSION,
    }
    return metadata | {key: TypedValue(n, GGUFValueType.UINT32) for key, n in own.items()}


def rows_in_file(
    name: str, rows: Shaped[Tensor, "rows ..."], config: ModelConfig
) -> Shaped[Tensor, "rows ..."]:
    """Return the rows of a matrix, or the numbers of a bias, in the order of a GGUF file.

    All tensors but Q and K of the Llama architecture keep their order.
    """
    heads = _heads_of_pairs(name, config)
    if heads == 0:
        return rows
    stored = torch.empty_like(rows)
    stored[unpermuted_rows(len(rows), heads)] = rows
    return stored


def _heads_of_pairs(name: str, config: ModelConfig) -> int:
    """Return the number of heads whose rows llama.cpp reorders; 0 if it does not."""
    if config.family not in ("llama", "mistral"):
        return 0
    module = name.rpartition(".")[0].rpartition(".")[2]
    heads: Mapping[str, int] = {"q_proj": config.q_heads, "k_proj": config.kv_heads}
    return heads.get(module, 0)
