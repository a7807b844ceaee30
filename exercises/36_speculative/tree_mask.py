"""Exercise tree_mask of chapter 36 (stretch, 15 points, about 20 minutes).

Verify several continuations in one step. Drafts form a tree: node i continues the node
`parents[i]`, or, if that is -1, the text itself, which every node sees anyway. Return an array
of bool, nodes by nodes: True at [i, j] if node i attends to node j. A node attends to itself
and to its ancestors: not to its siblings, not to their children, and not to its own children. A
parent comes before its children; raise ValueError, with a sentence, for one that does not, and
for a number below -1.

Check it:     minigen check exercises/36_speculative/tree_mask.py
With a hint:  minigen check exercises/36_speculative/tree_mask.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    parents = [-1, 0, 0, 1, 1, 2, 2]
    for node, row in enumerate(mine(parents)):
        print(node, "".join("■" if each else "·" for each in row))

Harder: A node's position in the text is the length of the text plus its depth, so siblings
share a position. Compute the positions, and verify a tree of two continuations with chapter
14's attention and your mask: its rows should be close to those of two steps, one for each
continuation.
"""

# exercise: minigen_course.ch36_speculative.reference.tree_mask
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool


def tree_mask(parents: Sequence[int]) -> Bool[np.ndarray, "nodes nodes"]:
    """Return which nodes of a tree of drafts each node attends to: its ancestors and itself.

    `parents[i]` is the node before node i, and -1 if node i follows the text itself. Raises
    `ValueError` for a parent that does not come before its child.
    """
    raise NotImplementedError  # your turn
