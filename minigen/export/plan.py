"""What each tensor of a model becomes under a scheme, and the refusals, before any work begins."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from minigen.checkpoint.checkpoint import Checkpoint
from minigen.checkpoint.safetensors import StoredTensor
from minigen.errors import OptionError
from minigen.export.gguf_blocks import GROUP, fitting_kind, kind_of_grid
from minigen.quantization.float_codes import NF4_BLOCK
from minigen.quantization.grid import Grid

Method = Literal["kind", "nearest", "gptq", "awq", "smoothquant", "float8", "nf4", "mixed"]
FLOATS = ("F32", "F16", "BF16")
CALIBRATION_TOKENS = 16_384
_HEAD_KIND = "Q6_K"  # llama.cpp's choice for the output head, or for an embedding that is also it
_ALL_IN_ONE_KIND = ("F32", "F16", "BF16", "Q8_0")  # here the head gets no kind of its own
_USUAL_GROUPS = (128, 64, 32, 16)
_GROUPS_IN_ERRORS = (256, 128, 96, 64, 48, 32, 16)


@dataclass(frozen=True)
class Scheme:
    """A name of `--scheme`: the method, the files it can be written to, and what it needs.

    `bits` are fixed if not None. `group_size` is the default: None chooses a usual size that
    divides all rows, -1 is a whole row. In GGUF it is always 32.
    """

    text: str
    method: Method
    gguf: bool
    directory: bool
    kind: str | None = None
    bits: int | None = None
    group_size: int | None = None
    symmetric: bool = True
    calibration: Literal["none", "optional", "needed"] = "none"


def _kind(kind: str, text: str, searches: bool = False) -> Scheme:
    calibration: Literal["none", "optional"] = "optional" if searches else "none"
    return Scheme(text, "kind", gguf=True, directory=False, kind=kind, calibration=calibration)


SCHEMES: dict[str, Scheme] = {
    "q4_0": _kind("Q4_0", "4 bits, blocks of 32 with a scale: 4.5 bits per weight"),
    "q4_1": _kind("Q4_1", "4 bits, blocks of 32 with scale and minimum: 5 bits per weight"),
    "q5_0": _kind("Q5_0", "5 bits, blocks of 32 with a scale: 5.5 bits per weight"),
    "q5_1": _kind("Q5_1", "5 bits, blocks of 32 with scale and minimum: 6 bits per weight"),
    "q8_0": _kind("Q8_0", "8 bits, blocks of 32 with a scale: 8.5 bits per weight"),
    "q2_k": _kind("Q2_K", "2 bits, 4-bit scales in blocks of 256: 2.6 bits per weight", True),
    "q3_k": _kind("Q3_K", "3 bits, 6-bit scales in blocks of 256: 3.4 bits per weight", True),
    "q4_k": _kind("Q4_K", "4 bits, 6-bit scales in blocks of 256: 4.5 bits per weight", True),
    "q5_k": _kind("Q5_K", "5 bits, 6-bit scales in blocks of 256: 5.5 bits per weight", True),
    "q6_k": _kind("Q6_K", "6 bits, 8-bit scales in blocks of 256: 6.6 bits per weight", True),
    "iq4_nl": _kind("IQ4_NL", "16 uneven values, blocks of 32: 4.5 bits per weight", True),
    "mxfp4": _kind("MXFP4", "4-bit floating point, blocks of 32: 4.25 bits per weight"),
    "f16": _kind("F16", "float16: 16 bits per weight"),
    "bf16": _kind("BF16", "bfloat16: 16 bits per weight"),
    "int4": Scheme("4 bits, rounded to nearest, in groups", "nearest", True, True, bits=4),
    "int8": Scheme(
        "8 bits, rounded to nearest, one scale per row",
        "nearest",
        True,
        True,
        bits=8,
        group_size=-1,
    ),
    "rtn": Scheme("2 to 8 bits (--bits), rounded to nearest, in groups", "nearest", True, True),
    "gptq": Scheme(
        "2 to 8 bits, each column makes up for the errors of the columns before it",
        "gptq",
        gguf=True,
        directory=True,
        calibration="needed",
    ),
    "awq": Scheme(
        "2 to 8 bits, important input channels are scaled up before rounding",
        "awq",
        gguf=True,
        directory=True,
        symmetric=False,
        calibration="needed",
    ),
    "w8a8": Scheme(
        "8 bits for weights and activations; with --calibration, outliers of activations move "
        "into the weights (SmoothQuant)",
        "smoothquant",
        gguf=False,
        directory=True,
        bits=8,
        group_size=-1,
        calibration="optional",
    ),
    "fp8": Scheme(
        "8-bit floating point for weights and activations, one scale per row", "float8", False, True
    ),
    "nf4": Scheme("bitsandbytes' 16 uneven values, blocks of 64", "nf4", False, True, bits=4),
    "mixed": Scheme(
        "2 to 8 bits per matrix: the best mixture for --target-bits per weight",
        "mixed",
        gguf=True,
        directory=True,
        calibration="needed",
    ),
}


@dataclass(frozen=True)
class QuantizeOptions:
    """How to quantize a model; the defaults of None depend on the scheme.

    `group_size` -1 makes each row one group. `calibration` is a text file, of which the first
    `calibration_tokens` are used (`CALIBRATION_TOKENS` if None). Raises `OptionError` for values
    that are impossible or do not belong to the scheme.
    """

    scheme: str
    bits: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    calibration: Path | None = None
    calibration_tokens: int | None = None
    target_bits: float | None = None
    allow_requantize: bool = False

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise OptionError(
                f"There is no scheme {self.scheme!r}; the schemes are {', '.join(SCHEMES)}."
            )
        own = SCHEMES[self.scheme]
        takes_bits = own.method in ("nearest", "gptq", "awq") and own.bits is None
        takes_groups = own.method in ("nearest", "gptq", "awq", "mixed")
        for name, given, taken in (
            ("bits", self.bits, takes_bits or self.bits == own.bits),
            ("group_size", self.group_size, takes_groups or self.group_size == own.group_size),
            ("symmetric", self.symmetric, takes_groups or self.symmetric == own.symmetric),
            ("calibration", self.calibration, own.calibration != "none"),
            ("target_bits", self.target_bits, own.method == "mixed"),
        ):
            if given is not None and not taken:
                raise OptionError(f"The scheme {self.scheme} takes no {name}: it is {own.text}.")
        if self.target_bits is not None and not 2 <= self.target_bits <= 16:
            raise OptionError(f"target_bits must be from 2 to 16, not {self.target_bits}.")
        if self.calibration_tokens is not None and self.calibration_tokens < 1:
            raise OptionError(
                f"calibration_tokens must be at least 1, not {self.calibration_tokens}."
            )
        if own.calibration == "needed" and self.calibration is None:
            raise OptionError(
                f"The scheme {self.scheme} needs calibration, a text file on which it watches what "
                "the matrices get as inputs; choose one unlike the text that you will judge by."
            )
        if self.calibration is None and self.calibration_tokens is not None:
            raise OptionError("calibration_tokens needs calibration, the text that they are of.")

    @property
    def own(self) -> Scheme:
        """The scheme that the name stands for."""
        return SCHEMES[self.scheme]


@dataclass(frozen=True)
class Plan:
    """What each tensor becomes.

    `kinds` (for GGUF) has every tensor, `grids` the matrices that get one; `made` are the matrices
    that have to be quantized, in the order of the file. `fallbacks` are those whose rows are no
    whole blocks of the kind that was asked for: name -> (wanted kind, kind, columns).
    """

    to_gguf: bool
    method: Method
    scale_dtype: torch.dtype
    made: tuple[str, ...]
    kinds: Mapping[str, str] = field(default_factory=dict)
    grids: Mapping[str, Grid] = field(default_factory=dict)
    fallbacks: Mapping[str, tuple[str, str, int]] = field(default_factory=dict)


def make_plan(checkpoint: Checkpoint, options: QuantizeOptions, to_gguf: bool) -> Plan:
    """Decide what each tensor becomes.

    Raises `OptionError` if the scheme cannot be written to such an output, if groups do not divide
    the rows, or if weights are quantized already and `allow_requantize` is not set.
    """
    own = options.own
    if not (own.gguf if to_gguf else own.directory):
        directory, file = "a directory, so give OUT no suffix", "a .gguf file, so let OUT end so"
        other = directory if own.directory else file
        raise OptionError(f"The scheme {options.scheme} is written to {other}.")
    linears = [name for name in checkpoint.tensors if _is_linear(name, checkpoint)]
    if own.method == "nf4":
        _refuse_ragged(checkpoint, linears)
    grids = _grids(checkpoint, options, linears, to_gguf)
    if not to_gguf:
        plan = Plan(False, own.method, scale_dtype(checkpoint), tuple(linears), grids=grids)
    else:
        wanted = {
            name: _wanted_kind(name, tensor, checkpoint, options, grids)
            for name, tensor in checkpoint.tensors.items()
        }
        columns = {name: tensor.shape[-1] for name, tensor in checkpoint.tensors.items()}
        kinds = {name: fitting_kind(kind, columns[name]) for name, kind in wanted.items()}
        fallbacks = {
            name: (wanted[name], kind, columns[name])
            for name, kind in kinds.items()
            if kind != wanted[name]
        }
        made = tuple(
            name
            for name in checkpoint.tensors
            if kinds[name] not in FLOATS
            and (name in grids or not is_stored_as(checkpoint, name, kinds[name]))
        )
        plan = Plan(True, own.method, torch.float16, made, kinds, grids, fallbacks)
    if not options.allow_requantize:
        _refuse_requantizing(checkpoint, plan)
    return plan


def _refuse_ragged(checkpoint: Checkpoint, linears: list[str]) -> None:
    """Raise `OptionError` for a matrix whose rows are no whole blocks of NF4."""
    for name in linears:
        if (columns := checkpoint.tensors[name].shape[1]) % NF4_BLOCK:
            raise OptionError(
                f"nf4 has blocks of {NF4_BLOCK} weights, but {name} has rows of {columns}; take "
                "int4, which has groups of other sizes, too."
            )


def is_stored_as(checkpoint: Checkpoint, name: str, kind: str) -> bool:
    """Return whether a tensor's bytes are those of a kind already, so that they can be copied."""
    is_same = checkpoint.tensors[name].kind == kind
    return is_same and (checkpoint.gguf_metadata is not None or kind in FLOATS)


def scale_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Return the dtype of scales in a directory.

    It is bfloat16 in a bfloat16 model, because vLLM converts scales to the model's dtype, and
    float16 elsewhere.
    """
    kind = checkpoint.tensors["model.embed_tokens.weight"].kind
    return torch.bfloat16 if kind == "BF16" else torch.float16


def _is_linear(name: str, checkpoint: Checkpoint) -> bool:
    return ".layers." in name and len(checkpoint.tensors[name].shape) == 2


def _grids(
    checkpoint: Checkpoint, options: QuantizeOptions, linears: list[str], to_gguf: bool
) -> dict[str, Grid]:
    own = options.own
    if own.method not in ("nearest", "gptq", "awq", "smoothquant", "mixed"):
        return {}
    size = options.group_size
    if size is None:
        size = GROUP if to_gguf else own.group_size
    widths = sorted({checkpoint.tensors[name].shape[1] for name in linears})
    fitting = [each for each in _USUAL_GROUPS if not any(width % each for width in widths)]
    if size is None:
        size = fitting[0] if fitting else -1
    bad = [width for width in widths if size != -1 and (size < 1 or width % size)]
    if bad:
        sizes = [str(each) for each in _GROUPS_IN_ERRORS if not any(w % each for w in widths)]
        raise OptionError(
            f"Groups of {size} do not divide the rows of {' and '.join(map(str, bad))} weights; "
            f"group_size {', '.join([*sizes, '-1'])} would fit (-1 is a whole row)."
        )
    bits = next(each for each in (options.bits, own.bits, 4) if each is not None)
    symmetric = own.symmetric if options.symmetric is None else options.symmetric
    return dict.fromkeys(linears, Grid(bits, size, symmetric))


def _wanted_kind(
    name: str,
    tensor: StoredTensor,
    checkpoint: Checkpoint,
    options: QuantizeOptions,
    grids: Mapping[str, Grid],
) -> str:
    """Return the kind of a tensor in a GGUF before rows that do not fit are looked at."""
    if len(tensor.shape) == 1:
        return "F32"  # llama.cpp's choice for norms and biases
    if name in grids:
        grid = grids[name]
        return kind_of_grid(grid.bits, grid.size_of_group(tensor.shape[1]), grid.symmetric)
    kind = options.own.kind
    is_head = name == "lm_head.weight" or checkpoint.config.tied_embeddings
    if kind is None or (
        is_head and not _is_linear(name, checkpoint) and kind not in _ALL_IN_ONE_KIND
    ):
        return _HEAD_KIND
    return kind


def _refuse_requantizing(checkpoint: Checkpoint, plan: Plan) -> None:
    sources: dict[str, int] = {}
    for name in plan.made:
        kind = checkpoint.tensors[name].kind
        if kind not in FLOATS:
            sources[kind] = sources.get(kind, 0) + 1
    if not sources:
        return
    kinds = ", ".join(f"{count} in {kind}" for kind, count in sources.items())
    raise OptionError(
        f"{checkpoint.path} is quantized already ({kinds}), and rounding rounded weights again "
        "adds a second error that no method sees; start from a model in float16, bfloat16 or "
        "float32, or set allow_requantize (--allow-requantize)."
    )
