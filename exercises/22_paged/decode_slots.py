"""Exercise decode_slots of chapter 22 (stretch, 15 points, about 10 minutes).

Write the slot mapping for a whole batch of decodes: `block_tables` has a row per sequence,
padded with 0 at its end, and `context_lens` the sequences' lengths, the new token included.
Return an array with the slot of each sequence's last token, with NumPy and without a loop: the
instructions of Python that run must not grow with the number of sequences. Leave the arguments
unchanged. A batch may have no sequences.

Check it:     minigen check exercises/22_paged/decode_slots.py
With a hint:  minigen check exercises/22_paged/decode_slots.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    import numpy as np

    print(mine(np.array([[7, 3], [5, 0]]), np.array([6, 4]), 4).tolist(), "should be [13, 23]")

Harder: Prompts come in chunks, so a batch holds sequences with one new token and others with
hundreds. Write it for those as well, with np.repeat and without a loop. From what number of
sequences on is it faster than a loop?
"""

# exercise: minigen_course.ch22_paged.lesson.decode_slots
import numpy as np
from jaxtyping import Int64


def decode_slots(
    block_tables: Int64[np.ndarray, "sequences max_blocks"],
    context_lens: Int64[np.ndarray, " sequences"],
    block_size: int,
) -> Int64[np.ndarray, " sequences"]:
    """Return the slot of each sequence's last token, of all sequences at once.

    `context_lens` counts the last token. Rows of `block_tables` are padded with 0 at their ends.

    >>> decode_slots(np.array([[7, 3], [5, 0]]), np.array([6, 4]), block_size=4).tolist()
    [13, 23]
    """
    raise NotImplementedError  # your turn
