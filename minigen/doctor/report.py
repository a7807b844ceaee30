"""The doctor's report as data: a machine's properties and results, in a versioned schema.

A report is written as JSON and may be read on another machine by another version of minigen. Every
field must be present with its type, and no other fields. Changing a field needs a new
`SCHEMA_VERSION`.
"""

import json
import sys
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from minigen.errors import FileFormatError

SCHEMA_VERSION = 2


@dataclass(frozen=True)
class Code:
    """minigen's version; `commit` is None outside of a checkout, and ends in -dirty after edits."""

    version: str
    commit: str | None


@dataclass(frozen=True)
class System:
    """The interpreter and the operating system."""

    python: str
    implementation: str
    platform: str
    compiler: str | None


@dataclass(frozen=True)
class Processor:
    """The processor as torch sees it; `cores` is the number that this process may use."""

    name: str
    architecture: str
    features: list[str]
    multiplies_bfloat16: bool
    cores: int


@dataclass(frozen=True)
class Threads:
    """Number of threads: torch's within and between operations, and the compiled kernels'."""

    torch: int
    torch_interop: int
    kernels: int


@dataclass(frozen=True)
class Memory:
    """Memory in bytes; `limit` is that of the container. None if the system does not report it."""

    total: int | None
    available: int | None
    limit: int | None


@dataclass(frozen=True)
class Torch:
    """torch's build, and the settings by which it chooses its kernels.

    `mps` says whether torch can compute on an Apple GPU here.
    """

    cpu_capability: str
    git_version: str
    compiler: str | None
    blas: str | None
    onednn: str | None
    onednn_enabled: bool
    openmp: str | None
    cuda: str | None
    mps: bool
    float32_matmul_precision: str


@dataclass(frozen=True)
class Gpu:
    """The first GPU that torch can use."""

    name: str
    memory: int
    capability: str


@dataclass(frozen=True)
class Text:
    """How this process converts bytes to text."""

    locale: str
    encoding: str
    file_names: str
    utf8_mode: bool


@dataclass(frozen=True)
class Model:
    """The default model; `status` is "right", "damaged" or "missing", by a new hash of the file.

    `auto` is the choice of weights="auto" for it; None without a model.
    """

    name: str
    status: str
    path: str | None
    sha256: str
    auto: str | None


@dataclass(frozen=True)
class Kernels:
    """The weight formats whose steps are compiled here, for a KV cache in bfloat16 and in int8.

    `instructions` names those that multiply many tokens; None without Numba.
    """

    compiled: list[str]
    compiled_for_int8_cache: list[str]
    instructions: str | None


@dataclass(frozen=True)
class Speed:
    """Measured memory reads (GB/s), products of square matrices (GFLOP/s), and decode products.

    `weights` is the number of weights per second that one token is multiplied with, by weight
    format and for torch, as measured when the kernels were compiled.
    """

    read: float
    matmul: dict[str, float]
    weights: dict[str, float]


@dataclass(frozen=True)
class Finding:
    """One line of the report: the topic, what was found, and a remedy if there is a problem."""

    topic: str
    found: str
    fine: bool = True
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    """The whole report. `fingerprints` has a hash per stage by weight format; None: no kernels."""

    schema_version: int
    minigen: Code
    system: System
    processor: Processor
    threads: Threads
    memory: Memory
    torch: Torch
    gpu: Gpu | None
    packages: dict[str, str | None]
    environment: dict[str, str | None]
    text: Text
    model: Model
    kernels: Kernels
    speed: Speed
    fingerprints: dict[str, dict[str, str] | None]
    findings: list[Finding]


def to_json(report: Report) -> str:
    """Return the report as JSON, in ASCII, so that no console encoding can damage it."""
    return json.dumps(asdict(report), indent=2, allow_nan=False)


def read_report(path: Path) -> Report:
    """Read a report from a file. Raises `FileFormatError` if the file is not a valid report."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FileFormatError(f"{path} cannot be read: {error.strerror or error}.") from None
    remedy = "write one with `minigen doctor --json > FILE`"
    try:
        found = json.loads(content)  # PowerShell's > writes UTF-16, which this reads too
    except (UnicodeDecodeError, RecursionError):
        raise FileFormatError(f"{path} is not JSON; {remedy}.") from None
    except json.JSONDecodeError as error:
        if _is_cut_short(error.doc.strip(), error):
            raise FileFormatError(f"{path} is cut short: its JSON has no end; {remedy}.") from None
        raise FileFormatError(f"{path} is not JSON (line {error.lineno}); {remedy}.") from None
    except ValueError as error:  # Python reads no integers of more than 4300 digits
        raise FileFormatError(f"{path} cannot be read: {error}; {remedy}.") from None
    if not isinstance(found, dict) or "schema_version" not in found:
        raise FileFormatError(f"{path} is JSON but not a report of minigen doctor; {remedy}.")
    if found["schema_version"] != SCHEMA_VERSION:
        raise FileFormatError(
            f"{path} has version {found['schema_version']!r} of the report, but this minigen reads "
            f"version {SCHEMA_VERSION}; write both reports with the same minigen."
        )
    try:
        report: Report = _built(Report, found, "the report")
    except ValueError as error:
        raise FileFormatError(f"{path} is not a valid report: {error}; {remedy}.") from None
    return report


def _is_cut_short(text: str, error: json.JSONDecodeError) -> bool:
    ends_inside = not text.endswith("}") or error.pos >= len(error.doc.rstrip())
    return text.startswith("{") and ends_inside


def _built(kind: Any, value: Any, where: str) -> Any:
    """Convert a value to its type in the schema. Raises `ValueError` naming a wrong field."""
    if is_dataclass(kind):
        _check(isinstance(value, dict), where, "an object", value)
        wanted = {field.name: field.type for field in fields(kind)}
        _check_keys(set(value), set(wanted), where)
        made = {name: _built(wanted[name], value[name], name) for name in wanted}
        return kind(**made)  # type: ignore[operator]
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        if value is None and NoneType in inner:
            return None
        return _built(inner[0], value, where)
    if origin is list:
        _check(isinstance(value, list), where, "a list", value)
        return [_built(inner[0], each, where) for each in value]
    if origin is dict:
        _check(isinstance(value, dict), where, "an object", value)
        return {name: _built(inner[1], each, f"{where}.{name}") for name, each in value.items()}
    if kind is float and isinstance(value, int | float):
        _check(abs(value) <= sys.float_info.max, where, "a finite number", value)
    takes = (int, float) if kind is float else kind
    fits = isinstance(value, takes) and (kind is bool or not isinstance(value, bool))
    _check(fits, where, kind.__name__, value)
    return value


def _check(fits: bool, where: str, wanted: str, value: Any) -> None:
    if not fits:
        raise ValueError(f"{where} should be {wanted}, not {type(value).__name__}")


def _check_keys(found: set[str], wanted: set[str], where: str) -> None:
    if wanted - found:
        raise ValueError(f"{where} lacks {sorted(wanted - found)[0]}")
    if found - wanted:
        raise ValueError(f"{where} has {sorted(found - wanted)[0]!r}, which it should not")
