"""Quantizes a model on disk into another one: plan, make each matrix, write the files.

    checkpoint --> plan --> a piece per matrix, kept in OUT.partial --> OUT

One matrix is in memory at a time, or one layer where a method calibrates. Everything that can be
refused is refused before the first matrix.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minigen.checkpoint.checkpoint import Checkpoint, open_checkpoint
from minigen.export.calibrated import extra_names, make_calibrated, read_windows
from minigen.export.directory_writer import DirectoryOutput
from minigen.export.gguf_blocks import block_size
from minigen.export.gguf_writer import GGUFOutput
from minigen.export.mixture import (
    DEFAULT_TARGET,
    TOKENS,
    added_bytes,
    check_target,
    choose_bits,
)
from minigen.export.partial import (
    PartialOutput,
    identity_of,
    partial_output,
    refuse_existing,
    require_space,
)
from minigen.export.pieces import finite, plain_piece
from minigen.export.plan import Plan, QuantizeOptions, make_plan
from minigen.hub.pypi import Progress, format_bytes

_VERSION = 2  # of the pieces; to be raised when a method gives other bytes
_LABEL, _MEASURING = "quantizing", "measuring sensitivity"


@dataclass(frozen=True)
class Report:
    """What was made: sizes in bytes, matrices quantized (some by an earlier run), and fallbacks."""

    out: Path
    source_bytes: int
    num_bytes: int
    num_made: int
    num_found: int
    fallbacks: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return the report in words, a line per fallback."""
        before, after = format_bytes(self.source_bytes), format_bytes(self.num_bytes)
        earlier = f" ({self.num_found} of them by an earlier run)" if self.num_found else ""
        return [
            *self.fallbacks,
            f"{self.num_made} matrices quantized{earlier}; {before} became {after}",
        ]


def quantize_model(
    path: Path,
    out: Path,
    options: QuantizeOptions,
    progress: Progress = lambda label, num_bytes, num_total_bytes: None,
) -> Report:
    """Quantize the model at `path` into `out`: a GGUF file if that ends in .gguf, else a directory.

    An interrupted run leaves `out`.partial, with which the same call goes on; the result is the
    same byte for byte. Raises a `MinigenError` that says what to do, before any work where that is
    possible.
    """
    checkpoint = open_checkpoint(path)
    to_gguf = out.suffix.lower() == ".gguf"
    refuse_existing(out)
    plan = make_plan(checkpoint, options, to_gguf)
    target_bits = options.target_bits or DEFAULT_TARGET
    make_output: type[GGUFOutput | DirectoryOutput] = GGUFOutput if to_gguf else DirectoryOutput
    output = make_output(checkpoint, plan)
    num_bytes = output.estimated_bytes([*checkpoint.tensors, *plan.made])  # pieces are kept, too
    if plan.method == "mixed":
        check_target(checkpoint, plan, target_bits)
        num_bytes += 2 * added_bytes(checkpoint, plan, target_bits)
    windows = read_windows(checkpoint, options)
    for name, tensor in checkpoint.tensors.items():
        if len(tensor.shape) == 1:  # norms and biases, which are written last
            finite(name, tensor.dequantize())
    require_space(out, num_bytes)
    names = (*plan.made, *extra_names(checkpoint, plan, options))
    with partial_output(out, _identity(path, options, to_gguf), names) as partial:
        num_found = sum(partial.has(name) for name in plan.made)
        tell = _teller(checkpoint, plan, partial, progress)
        if plan.method == "mixed":
            tell_layer = _layer_teller(checkpoint, progress)
            window = windows[0][:TOKENS]
            plan = choose_bits(checkpoint, plan, target_bits, partial, window, tell_layer)
            output = make_output(checkpoint, plan)
        elif windows:
            make_calibrated(checkpoint, plan, partial, windows, tell)
        for name in plan.made:
            if not partial.has(name):
                partial.put(name, plain_piece(checkpoint.tensors[name], plan))
                tell()
        with partial.writing() as path_of_output:
            output.write(path_of_output, partial)
    sizes = checkpoint.num_bytes, _size_of(out)
    return Report(out, *sizes, len(plan.made), num_found, fallback_lines(plan))


def fallback_lines(plan: Plan) -> tuple[str, ...]:
    """Return a line for each module that got another kind than was asked for, with its layers."""
    found: dict[tuple[str, str, str, int], list[int]] = {}
    for name, (wanted, kind, columns) in plan.fallbacks.items():
        place = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
        module = place[2] if place else name.removesuffix(".weight")
        layers = found.setdefault((module, wanted, kind, columns), [])
        layers += [int(place[1])] if place else []
    return tuple(
        f"{module}{f' of layers {_ranges(layers)}' if layers else ''}: {kind}, because rows of "
        f"{columns} are no whole blocks of {block_size(wanted)} for {wanted}"
        for (module, wanted, kind, columns), layers in found.items()
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Return numbers, in whatever order, as ranges: 0-2, 5."""
    ordered = sorted(numbers)
    text, start = [], ordered[0]
    for number, after in zip(ordered, [*ordered[1:], None], strict=True):
        if after != number + 1:
            text.append(str(start) if start == number else f"{start}-{number}")
            start = number if after is None else after
    return ", ".join(text)


def _teller(
    checkpoint: Checkpoint, plan: Plan, partial: PartialOutput, progress: Progress
) -> Callable[[], None]:
    """Return a function that tells `progress` how many bytes of the source are finished."""
    sizes = {name: checkpoint.tensors[name].num_bytes for name in plan.made}
    total = sum(sizes.values())

    def tell() -> None:
        progress(_LABEL, sum(sizes[name] for name in sizes if partial.has(name)), total)

    tell()
    return tell


def _layer_teller(checkpoint: Checkpoint, progress: Progress) -> Callable[[int], None]:
    num_layers, total = checkpoint.config.num_layers, checkpoint.num_bytes
    return lambda done: progress(_MEASURING, done * total // num_layers, total)


def _identity(path: Path, options: QuantizeOptions, to_gguf: bool) -> dict[str, Any]:
    """Return what the pieces depend on, in values of JSON."""
    chosen = {key: value for key, value in asdict(options).items() if key != "allow_requantize"}
    if options.calibration is not None:
        chosen["calibration"] = hashlib.sha256(options.calibration.read_bytes()).hexdigest()
    return {
        "version": _VERSION,
        "output": "GGUF" if to_gguf else "directory",
        **chosen,
        "source": identity_of(path),
    }


def _size_of(path: Path) -> int:
    """Return the bytes of a file, or of the weights in a directory."""
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)
