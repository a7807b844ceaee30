"""What only some systems offer; elsewhere each of these does nothing, and nothing is lost."""

import ctypes
import mmap
import sys

from jaxtyping import UInt8
from torch import Tensor

_MADV_PAGEOUT = 21  # Linux 5.4: reclaim these pages now; they come back when they are touched


def page_out(data: UInt8[Tensor, "rows row_bytes"]) -> None:
    """Give the memory of a mapped file's bytes back to the system; they stay readable."""
    if sys.platform != "linux":
        return
    page = mmap.PAGESIZE
    start = -(-data.data_ptr() // page) * page
    end = (data.data_ptr() + data.numel()) // page * page
    if end > start:
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_PAGEOUT
        )
