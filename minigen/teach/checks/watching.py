"""Learners' kernels in Triton's interpreter, every load and store of them looked at."""

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from minigen.errors import OptionError
from minigen.teach.accesses import Access
from minigen.teach.interpreted import record
from minigen.teach.messages import Wrong


def watched(run: Callable[[], object], **tensors: Tensor) -> list[Access]:
    """What the kernel that `run` launches loads and stores.

    Raises `Wrong` where it reaches outside of its tensors, before it does, or cannot be run here.
    """
    try:
        with np.errstate(all="ignore"):  # a GPU says nothing of overflows either
            return record(run, **tensors)
    except (IndexError, OptionError) as error:
        raise Wrong(str(error)) from None


def expect_numbers(found: Tensor, what: str, axes: Sequence[str]) -> None:
    """What was all nan before a kernel ran must be numbers after it."""
    missing = found.isnan().nonzero()
    if len(missing):
        place = zip(axes, missing[0].tolist(), strict=True)
        where = ", ".join(f"{axis} {index}" for axis, index in place)
        raise Wrong(
            f"{what}: {len(missing)} of {found.numel()} numbers are nan, first at {where}; each "
            "should be stored. (nan comes of lanes that a mask left out, too, and of infinities.)"
        )
