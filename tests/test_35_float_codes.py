"""NF4 and FP8: the published values, and the nearest of them for every weight."""

import json

import numpy as np
import pytest
import torch
from scipy.stats import norm

from minigen.errors import OptionError, WeightsError
from minigen.quantization.float_codes import (
    FP8_MAX,
    NF4_VALUES,
    round_to_fp8,
    round_to_nf4,
)
from tests.golden import make_grids


def test_nf4_has_the_quantiles_of_the_normal_distribution() -> None:
    """bitsandbytes' `create_normal_map`: 8 positive and 7 negative quantiles, and 0."""
    offset = 0.9677083
    positive = norm.ppf(np.linspace(offset, 0.5, 9)[:-1])
    negative = -norm.ppf(np.linspace(offset, 0.5, 8)[:-1])
    values = np.sort(np.concatenate([positive, [0.0], negative]))
    np.testing.assert_allclose(NF4_VALUES.numpy(), values / values.max(), atol=2e-6)


def test_every_weight_goes_to_the_nearest_nf4_value() -> None:
    weight = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    weight[1, :64] = 0
    matrix = round_to_nf4(weight)
    assert matrix.num_bytes == 3 * 64 + 6 * 4
    candidates = NF4_VALUES * matrix.absmax.unsqueeze(-1)  # rows, blocks, 16
    blocks = weight.unflatten(-1, (2, 64))
    nearest = (blocks.unsqueeze(-1) - candidates.unsqueeze(-2)).abs().amin(-1)
    found = (matrix.dequantize() - weight).abs().unflatten(-1, (2, 64))
    torch.testing.assert_close(found, nearest)


def test_nf4_codes_are_those_of_bitsandbytes() -> None:
    theirs = json.loads(make_grids.STORED.read_text(encoding="utf-8"))["nf4"]
    found = round_to_nf4(make_grids.weight())
    assert found.absmax.flatten().tolist() == theirs["absmax"]
    pairs = found.codes.flatten().unflatten(0, (-1, 2)).int()  # the first code is the high half
    assert (pairs[:, 0] * 16 + pairs[:, 1]).tolist() == theirs["packed"]


def e4m3fn(code: int) -> float:
    """Decode a byte as its definition says: 1 bit of sign, 4 of exponent (bias 7), 3 of fraction.

    There is no infinity; the largest exponent has numbers up to 448, and one NaN.
    """
    exponent, fraction = code >> 3 & 15, code & 7
    if exponent == 15 and fraction == 7:
        return float("nan")
    size = (8 + fraction) * 2.0 ** (exponent - 10) if exponent else fraction * 2.0**-9
    return -size if code >> 7 else size


def test_every_weight_goes_to_the_nearest_fp8_number() -> None:
    weight = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)) ** 3
    weight[2] = 0
    matrix = round_to_fp8(weight)
    numbers = torch.tensor([e4m3fn(code) for code in range(256)])
    codes = matrix.codes.view(torch.uint8).int()
    torch.testing.assert_close(matrix.dequantize(), numbers[codes] * matrix.scales)
    finite = numbers[~numbers.isnan()]
    scaled = (weight / matrix.scales).unsqueeze(-1)
    nearest = (scaled - finite).abs().amin(-1)
    torch.testing.assert_close((scaled[..., 0] - numbers[codes]).abs(), nearest)
    assert float(matrix.codes.float().abs().max()) == FP8_MAX
    assert matrix.num_bytes == 5 * 40 + 5 * 4


def test_bad_weights_are_refused() -> None:
    with pytest.raises(OptionError, match=r"row of 65 weights .* NF4 blocks of 64"):
        round_to_nf4(torch.zeros(1, 65))
    for rounded in (round_to_nf4, round_to_fp8):
        with pytest.raises(WeightsError, match="not finite"):
            rounded(torch.full((1, 64), torch.nan))
