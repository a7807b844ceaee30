"""Exercise merge_parts of chapter 42 (core, 10 points, about 15 minutes).

Merge two partial attentions. The keys of some tokens lie in two sets. For each set there is an
output (the mean of the set's values, weighted by softmax over the set alone) and its `lse`: the
log of the sum of exp(score) over the set's keys. Return the output and the `lse` over both
sets, as if all keys had been in one. Scores may be large, so exp(lse) alone may overflow. A
token that sees no key of a set has an `lse` of -inf there, and any finite output, which must
not count. If it sees no key of either, return 0 and -inf. The four given tensors must not
change.

Check it:     minigen check exercises/42_pipeline/merge_parts.py
With a hint:  minigen check exercises/42_pipeline/merge_parts.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    import torch

    from minigen_course.ch42_pipeline.lesson import attend_part, ring_attention
    from minigen_course.ch42_pipeline.reference import zig_zag

    q, k, v = (torch.randn(24, 2, 8) for _ in range(3))
    ranks = [zig_zag(24, rank, 4) for rank in range(4)]
    off = (ring_attention(q, k, v, ranks, mine) - attend_part(q, k, v, range(24), range(24))[0]).abs()
    print(f"a ring of 4 ranks, 24 tokens: off by at most {off.max():.1e}")

Harder: Merge n parts at once, as a rank does that has received the partial results of all ranks
for a decode step: one maximum over all `lse`, then one sum. Is the result the same to the last
bit as with n - 1 merges of two? Which order of merging would make it the same on every rank?
"""

# exercise: minigen_course.ch42_pipeline.reference.merge_parts
import torch
from jaxtyping import Float
from torch import Tensor


def merge_parts(
    out: Float[Tensor, "tokens heads head_dim"],
    lse: Float[Tensor, "tokens heads"],
    other_out: Float[Tensor, "tokens heads head_dim"],
    other_lse: Float[Tensor, "tokens heads"],
) -> tuple[Float[Tensor, "tokens heads head_dim"], Float[Tensor, "tokens heads"]]:
    """Return the attention over two sets of keys, from the attention over each of them.

    `out` is the weighted mean of a set's values, and `lse` the log of the sum of exp(score) over
    its keys. A token that sees no key of a set has an `lse` of -inf there, and any finite `out`. If
    it sees no key of either, its result is 0 with an `lse` of -inf.
    """
    raise NotImplementedError  # your turn
