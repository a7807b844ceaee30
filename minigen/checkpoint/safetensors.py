"""Weights on disk: named tensors, mapped into memory and kept in their stored number format.

Opening a file copies nothing. A `StoredTensor` is a view of the file's bytes, and `dequantize()`
reads only the rows and columns that the tensor was cut to. Source: the safetensors format (a JSON
header, then bytes), read by the `safetensors` library. GGUF is in `minigen.checkpoint.gguf`.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Float32, Int32, Int64, UInt8
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minigen.checkpoint.config_json import read_json
from minigen.checkpoint.quant_formats import FORMATS, Format
from minigen.errors import FileFormatError, UnsupportedError, WeightsError
from minigen.hardware import page_out

_KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPES = {  # by their names in a header; those without a kind occur in quantised checkpoints
    **{kind: dtype for dtype, kind in _KINDS.items()},
    **{"I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    **({"F8_E8M0": torch.float8_e8m0fnu} if hasattr(torch, "float8_e8m0fnu") else {}),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
_CHUNK_ROWS = 1024  # bounds the memory that dequantizing needs in addition to its result
_MAX_LISTED = 8  # tensors in one error message


@dataclass(frozen=True)
class IntegerCodes:
    """What the integer codes of a quantised matrix mean: weight = (code - zero) x scale.

    A code has `bits` bits. `group_size` neighbouring columns of a row share a scale and a zero
    point; the last group may be narrower. `read` returns the codes.
    """

    bits: int
    group_size: int
    scales: Float32[Tensor, "rows groups"]
    zeros: Int32[Tensor, "rows groups"]
    read: Callable[[], UInt8[Tensor, "rows columns"]]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as its file holds it: number format, shape, and the mapped bytes of its rows.

    `row_order` is set if the file stores the rows in another order than the model needs. It lists
    the stored row for each row of the model. Cutting rows cuts `row_order` and not the bytes.
    `is_mapped_file` says that `data` is certainly mapped from the file, privately and unchanged.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    data: UInt8[Tensor, "rows row_bytes"]
    row_order: Int64[Tensor, " kept_rows"] | None = None
    is_mapped_file: bool = False

    @property
    def format(self) -> Format:
        """The number format of the bytes."""
        return FORMATS[self.kind]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in its file, in bytes."""
        return self._num_rows * self.data.shape[1]

    @property
    def row_unit(self) -> int:
        """Rows can be cut at multiples of this number."""
        return 1

    @property
    def column_unit(self) -> int:
        """Columns can be cut at multiples of this number."""
        return self.format.block_size

    def integers(self) -> IntegerCodes | None:
        """Return the integer codes of a matrix of several tensors; None for other tensors."""
        return None

    @property
    def _num_rows(self) -> int:
        return len(self.data if self.row_order is None else self.row_order)

    def rows(self, start: int, stop: int) -> "StoredTensor":
        """Return the rows `start` to `stop` as a stored tensor, without reading them."""
        if not 0 <= start < stop <= self.shape[0]:
            raise IndexError(f"{self.name} has rows 0 to {self.shape[0]}, not {start} to {stop}")
        shape = (stop - start, *self.shape[1:])
        if len(self.shape) == 1:
            return self._cut_columns(start, stop, shape)
        if self.row_order is None:
            return replace(self, shape=shape, data=self.data[start:stop])
        return replace(self, shape=shape, row_order=self.row_order[start:stop])

    def columns(self, start: int, stop: int) -> "StoredTensor":
        """Return the columns `start` to `stop`; both must lie on block boundaries."""
        if len(self.shape) != 2 or not 0 <= start < stop <= self.shape[1]:
            raise IndexError(f"{self.name} of shape {self.shape} has no columns {start} to {stop}")
        return self._cut_columns(start, stop, (self.shape[0], stop - start))

    def _cut_columns(self, start: int, stop: int, shape: tuple[int, ...]) -> "StoredTensor":
        block = self.format.block_size
        if start % block or stop % block:
            raise IndexError(f"{self.name}: {self.kind} can be cut at multiples of {block} only")
        cut = slice(self.format.row_bytes(start), self.format.row_bytes(stop))
        return replace(self, shape=shape, data=self.data[:, cut])

    def dequantize(
        self, dtype: torch.dtype = torch.float32, out: Tensor | None = None
    ) -> Float[Tensor, "..."]:
        """Return the tensor in `dtype`, in new memory (or in `out`, which must have its shape)."""
        if out is None:
            out = torch.empty(self.shape, dtype=dtype)
        target = out.view(self._num_rows, -1)
        for start in range(0, self._num_rows, _CHUNK_ROWS):
            chunk = slice(start, start + _CHUNK_ROWS)
            raw = self.data[chunk if self.row_order is None else self.row_order[chunk]]
            blocks = raw.unflatten(-1, (-1, self.format.block_bytes))
            target[chunk] = self.format.unpack(blocks).flatten(-2)
        return out

    def release_pages(self) -> None:
        """Return the memory of the file's pages to the system; the bytes stay readable."""
        if self.data.is_contiguous():
            page_out(self.data, self.is_mapped_file)


@dataclass(frozen=True)
class RawTensor:
    """A tensor of any dtype and shape, still mapped, and the file that holds it."""

    path: Path
    name: str
    tensor: Tensor

    def stored(self) -> StoredTensor:
        """Return a vector or matrix of floating-point numbers as a stored tensor.

        Raises `UnsupportedError` for another shape, and a dtype other than F32, F16 and BF16.
        """
        tensor = self.tensor
        if tensor.dtype not in _KINDS:
            raise _unreadable(self.path, self.name, _NAMES.get(tensor.dtype, tensor.dtype))
        if tensor.dim() not in (1, 2) or tensor.numel() == 0:
            raise UnsupportedError(f"{self.path}: {self.name} has the shape {tuple(tensor.shape)}.")
        rows = tensor.unsqueeze(0) if tensor.dim() == 1 else tensor
        kind = _KINDS[tensor.dtype]
        return StoredTensor(self.name, kind, tuple(tensor.shape), rows.view(torch.uint8))


def read_safetensors(path: Path, sizes: Mapping[str, int] | None = None) -> dict[str, StoredTensor]:
    """Return the stored tensors of `read_raw`, in a checkpoint that is not quantised.

    Raises `UnsupportedError` for a dtype other than F32, F16 and BF16.
    """
    return {name: each.stored() for name, each in read_raw(path, sizes).items()}


def read_raw(path: Path, sizes: Mapping[str, int] | None = None) -> dict[str, RawTensor]:
    """Map the tensors of one file or, for a directory, of `model.safetensors` or of all shards.

    If the files end after their headers, `sizes` are the bytes of the whole files by name; the
    tensors then have a shape and no bytes (torch's meta device). Raises `FileFormatError` for a
    broken file or index, `UnsupportedError` for a dtype that torch does not have.
    """
    if path.is_file():
        return dict(_tensors_of_file(path, sizes))
    index = path / "model.safetensors.index.json"
    if (path / "model.safetensors").exists() or not index.exists():
        return _only_file(path, sizes)
    shard_of = read_json(index).get("weight_map")
    if not isinstance(shard_of, dict) or not all(isinstance(s, str) for s in shard_of.values()):
        raise FileFormatError(f"{index} must have a weight_map from tensors to shards.")
    for name in (*shard_of, *shard_of.values()):
        if not name.isprintable():
            raise FileFormatError(f"{index} has a name that is not printable: {name[:80]!r}.")
    stored: dict[str, RawTensor] = {}
    for shard in sorted(set(shard_of.values())):
        if shard in ("", "..") or Path(shard).name != shard:
            raise FileFormatError(
                f"{index}: the shard {shard!r} must be a file in the same directory."
            )
        tensors = dict(_tensors_of_file(path / shard, sizes))
        strays = sorted(name for name in tensors if shard_of.get(name) != shard)
        if strays:
            raise FileFormatError(
                f"{path / shard} holds {strays[0]}, but {index} does not list it there."
            )
        stored |= tensors
    lost = sorted(set(shard_of) - set(stored))
    if lost:
        raise FileFormatError(
            f"{index} lists {lost[0]} in {shard_of[lost[0]]}, which does not contain it."
        )
    return stored


def _only_file(directory: Path, sizes: Mapping[str, int] | None) -> dict[str, RawTensor]:
    """Read `model.safetensors`, the name that transformers uses, or else the only other file."""
    usual = directory / "model.safetensors"
    files = [usual] if usual.exists() else sorted(directory.glob("*.safetensors"))
    if len(files) != 1:
        found = "no .safetensors file" if not files else f"{len(files)} of them and no index"
        raise FileFormatError(
            f"{directory} must hold model.safetensors or an index; it has {found}."
        )
    return dict(_tensors_of_file(files[0], sizes))


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Return each tensor's `dtype`, `shape` and `data_offsets`; the file may end after its header.

    Raises `OSError` or `ValueError` for a file without a valid header.
    """
    with path.open("rb") as file:
        length = header_bytes(file.read(8)) - 8
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    return {name: each for name, each in header.items() if name != "__metadata__"}


def header_bytes(beginning: bytes) -> int:
    """Return the size of a file's header, its 8-byte length included, from the first 8 bytes."""
    length = int.from_bytes(beginning[:8], "little")
    if len(beginning) < 8 or length > _MAX_HEADER_BYTES:
        raise ValueError(f"its header claims {length} bytes")
    return 8 + length


def _tensors_of_file(
    path: Path, sizes: Mapping[str, int] | None
) -> Iterator[tuple[str, RawTensor]]:
    try:
        if sizes is not None:
            if path.name not in sizes:
                raise FileFormatError(f"{path} is missing.")
            for name, each in _described_tensors(path, sizes[path.name]):
                yield _printable(path, name), each
            return
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                yield _printable(path, name), RawTensor(path, name, file.get_tensor(name))
    except FileNotFoundError:
        raise FileFormatError(f"{path} is missing.") from None
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FileFormatError(f"{path} is not a valid safetensors file: {reason}.") from None


def _printable(path: Path, name: str) -> str:
    """Return a tensor's name; it must be printable, because errors may show it."""
    if not name.isprintable():
        raise FileFormatError(f"{path} has a tensor whose name is not printable: {name[:80]!r}.")
    return name


def _described_tensors(path: Path, num_bytes: int) -> Iterator[tuple[str, RawTensor]]:
    """Yield the tensors that the header describes, on the meta device."""
    end = path.stat().st_size
    for name, each in read_header(path).items():
        if each["dtype"] not in _DTYPES:
            raise _unreadable(path, name, each["dtype"])
        tensor = torch.empty(each["shape"], dtype=_DTYPES[each["dtype"]], device="meta")
        yield name, RawTensor(path, name, tensor)
        end += tensor.nbytes
    if end != num_bytes:
        raise ValueError(f"its tensors end at byte {end}, but it has {num_bytes} bytes")


def _unreadable(path: Path, name: str, dtype: object) -> UnsupportedError:
    return UnsupportedError(
        f"{path}: {name} is stored as {dtype}; minigen reads F32, F16 and BF16."
    )


def check_tensors(
    stored: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Compare the tensors of a file with those that a model needs.

    Raises one `WeightsError` that names every tensor that is missing, unexpected or of a wrong
    shape (the first few of each).
    """
    missing = [f"{name} {shape}" for name, shape in expected.items() if name not in stored]
    unexpected = [f"{name} {stored[name].shape}" for name in stored if name not in expected]
    misshapen = [
        f"{name} expected {shape}, found {stored[name].shape}"
        for name, shape in expected.items()
        if name in stored and stored[name].shape != shape
    ]
    groups = (("missing", missing), ("unexpected", unexpected), ("of a wrong shape", misshapen))
    problems = [
        f"{len(names)} {what}: {'; '.join(names[:_MAX_LISTED])}"
        + ("; ..." if len(names) > _MAX_LISTED else "")
        for what, names in groups
        if names
    ]
    if problems:
        raise WeightsError(f"{where} does not fit its configuration: {'. '.join(problems)}.")
