"""Exercise pick_fastest of chapter 31 (stretch, 15 points, about 20 minutes).

Write an auto-tuner: plain Python that tries several sizes of a kernel and keeps the fastest.
`seconds(size)` runs the kernel once and returns its time, or infinity if the size does not fit
the chip; then leave that size out, without running it again. A size's first run does not count,
because it compiles. Then run each size that fits `repeats` times, and compare the medians. Keep
the choice in `found` under `key`, which stands for the shapes; for a key that is there, run
nothing. Raise ValueError if no size fits.

Check it:     minigen check exercises/31_triton/pick_fastest.py
With a hint:  minigen check exercises/31_triton/pick_fastest.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    import time

    import torch

    x = torch.randn(512, 4096)


    def seconds(rows):
        begin = time.perf_counter()
        for start in range(0, len(x), rows):
            x[start : start + rows].softmax(-1)
        return time.perf_counter() - begin


    print("rows at once:", mine(tuple(x.shape), [1, 16, 512], seconds, {}))

Harder: Triton's own tuner measures every size for a fixed time, and empties the L2 cache
between two runs. Why does it do the second, and in which engine would you leave it out?
"""

# exercise: minigen_course.ch31_triton.kernels.pick_fastest
from collections.abc import Callable, Hashable, Sequence
from typing import Any


def pick_fastest(
    key: Hashable,
    sizes: Sequence[Any],
    seconds: Callable[[Any], float],
    found: dict[Hashable, Any],
    repeats: int = 5,
) -> Any:
    """Return the fastest size for problems of this key, and keep it in `found`.

    `seconds(size)` runs the kernel once and returns its time, or infinity if the size does not fit
    the chip. A size's first run does not count, because it compiles. A size that fits is run
    `repeats` times more, and its median counts. If `found` has the key, nothing is run. Raises
    `ValueError` if no size fits.
    """
    raise NotImplementedError  # your turn
