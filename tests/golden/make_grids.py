"""Quantize one small matrix by other projects' code: `python -m tests.golden.make_grids`.

It needs bitsandbytes and compressed-tensors, which the project does not: run it in an environment
of its own. tests/test_35_methods.py and test_35_float_codes.py compare minigen with what it wrote.
"""

import json
from importlib.metadata import version
from pathlib import Path

import torch

STORED = Path(__file__).parent / "grids.json"
ROWS, COLUMNS, GROUP = 3, 128, 64


def weight() -> torch.Tensor:
    """Return a matrix with a few large values per row, by a formula."""
    numbers = torch.arange(ROWS * COLUMNS, dtype=torch.int64) * 2_654_435_761 % 2**32
    return ((numbers.double() / 2**31 - 1) ** 3).float().reshape(ROWS, COLUMNS)


def main() -> None:
    """Write NF4 codes by bitsandbytes, and scales, zeros and packed codes by compressed-tensors."""
    from bitsandbytes.functional import quantize_4bit
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    packed, state = quantize_4bit(
        weight(), blocksize=GROUP, quant_type="nf4", compress_statistics=False
    )
    found = {
        "versions": {name: version(name) for name in ("bitsandbytes", "compressed-tensors")},
        "nf4": {"packed": packed.flatten().tolist(), "absmax": state.absmax.tolist()},
    }
    for bits in (2, 3, 4, 8):
        for symmetric in (True, False):
            args = QuantizationArgs(
                num_bits=bits, symmetric=symmetric, strategy="group", group_size=GROUP
            )
            groups = weight().unflatten(-1, (-1, GROUP))
            scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
            codes = quantize(weight(), scales, zeros, args, dtype=torch.int8)
            found[f"{bits} bits, {'symmetric' if symmetric else 'asymmetric'}"] = {
                "scales": scales.tolist(),
                "zeros": zeros.tolist(),
                "packed": pack_to_int32(codes, bits).tolist(),
            }
    lines = [f"{json.dumps(name)}: {json.dumps(each)}" for name, each in found.items()]
    STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
