"""Whether this process may use AMX tiles, and the memory that their products need."""

import ctypes
import platform
import sys
from functools import cache
from typing import NamedTuple

import numpy as np

from minigen.kernels.cpu.arrays.aligned import NUM_LANES, zeros
from minigen.kernels.processor import fastest_of, names_of, target_features

ROWS, ROW_BYTES = 16, 64  # of the largest tile
PARTS = 4  # panels that are multiplied together
BLOCK = 128  # tokens whose products are kept until all panels of a task are done
TILE = ROWS * NUM_LANES  # words of a tile
ROW = PARTS * NUM_LANES  # products of a token
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # of Linux on x86-64


@cache
def permitted() -> bool:
    """Ask Linux to let this process use tiles, and return whether it does."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def has_tiles() -> bool:
    """Return whether kernels may use tiles of bytes and bfloat16 in this process.

    Numba must compile for a processor that has them, and the system must permit them.
    """
    return {"amx-tile", "amx-int8", "amx-bf16"} <= names_of(target_features()) and permitted()


USE_TILES = has_tiles()


def instructions() -> str:
    """Return the name of the instructions by which many tokens are multiplied in this process."""
    return "AMX tiles" if USE_TILES else fastest_of(names_of(target_features()))


class TileScratch(NamedTuple):
    """What a worker needs on its way from packed codes to products; all parts start a cache line.

    `codes` are panels as tiles of bfloat16, `steps` their scales and offsets as float32. The first
    axis is workers.
    """

    codes: np.ndarray  # [parts, groups, 16 pairs of columns, 16 outputs]
    steps: np.ndarray  # [parts, groups, 2, 16 outputs]
    dots: np.ndarray  # [2, 16 tokens, 16 outputs]
    products: np.ndarray  # [BLOCK tokens, parts, 16 outputs]


def tile_scratch(in_bfloat16: bool, groups: int, num_workers: int) -> TileScratch:
    """Allocate scratch for products of up to `groups` groups, empty without AMX."""
    parts, tile_sums = (0 if in_bfloat16 else PARTS), BLOCK * ROW
    if not USE_TILES:
        parts = tile_sums = 0
    return TileScratch(
        zeros((num_workers, parts * groups * TILE), np.int32),
        zeros((num_workers, parts * groups * 2 * NUM_LANES), np.float32),
        zeros((num_workers, 2 * TILE), np.float32),
        zeros((num_workers, tile_sums), np.float32),
    )
