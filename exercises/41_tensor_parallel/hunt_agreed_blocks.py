"""Bug hunt agreed_blocks of chapter 41 (core, 10 points, about 25 minutes).

**The report.** *A model runs on two devices. Each question alone gets the right answer. In the
afternoon, when memory is full and requests are preempted, some answers are nonsense, and once a
day everything hangs, without an error.* Every rank there schedules for itself, by the same
rules, and a preempted request returns as soon as there are enough free blocks. Engines
therefore make the ranks agree on the size of the KV cache first: vLLM takes the smallest number
of blocks that any of its workers can have, SGLang the smallest free memory of all ranks.

Find the mistake in the part below. Catch it with a test that fails on this part and passes on
every correct one. Then mend the part in the same file.

Check both:  minigen check exercises/41_tensor_parallel/hunt_agreed_blocks.py
"""

# hunt: minigen_course.ch41_tensor_parallel.hunt
import torch

from minigen.parallel.comm import Comm
from minigen_course.ch41_tensor_parallel.lesson import AgreedBlocks


def agreed_blocks(comm: Comm, free_bytes: int, working_bytes: int, block_bytes: int) -> int:
    """Return the number of blocks of every rank's pool: as many as fit on all ranks.

    Each rank calls it with its own free memory, and with the part of it that the rank needs as
    working memory. A block takes the same number of bytes on every rank.
    """
    free = comm.all_gather(torch.tensor([free_bytes]))
    left = int(free.min()) - working_bytes
    return left // block_bytes


def test_agreed_blocks(agreed_blocks: AgreedBlocks) -> None:
    """Assert what holds for every right `agreed_blocks`, and does not hold for the one above.

    `on_ranks(agreed_blocks, [(free, working), ...], block_bytes)` of
    minigen_course.ch41_tensor_parallel.lesson runs one rank per pair, and returns the result of
    each.
    """
    raise NotImplementedError  # your turn
