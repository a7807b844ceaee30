"""Exercise zig_zag of chapter 42 (warm-up, 5 points, about 10 minutes).

Share a prompt among the ranks of a ring so that each has the same work. Cut the `num_tokens`
positions into 2 n consecutive chunks for n ranks. Rank i gets chunk i and chunk 2 n - 1 - i. If
the tokens do not divide, the first chunks have one token more than the others. Return the
positions of `rank`, in ascending order; a rank may get none.

Check it:     minigen check exercises/42_pipeline/zig_zag.py
With a hint:  minigen check exercises/42_pipeline/zig_zag.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    from minigen_course.ch42_pipeline.lesson import num_pairs, plain_part

    for name, part in (("plain", plain_part), ("zig-zag", mine)):
        pairs = [num_pairs(part(4096, rank, 4), range(4096)) for rank in range(4)]
        print(f"{name:<8} pairs of query and key by rank: {pairs}")

Harder: Striped attention gives rank r the positions r, r + n, r + 2 n and so on. Compare its
pairs by turn and rank with those of zig-zag (`ring_pairs`). Then look at one block: which of
its pairs are masked? A kernel works on square tiles of queries and keys, and skips a tile only
if all of it is masked. In which turns does each of the two ways have tiles that are half
masked?
"""

# exercise: minigen_course.ch42_pipeline.reference.zig_zag
def zig_zag(num_tokens: int, rank: int, num_ranks: int) -> list[int]:
    """Return the positions of a prompt that a rank gets, in ascending order.

    The prompt is cut into 2 n chunks for n ranks, and rank i gets chunk i and chunk 2 n - 1 - i. If
    the tokens do not divide, the first chunks have one token more than the others.
    """
    raise NotImplementedError  # your turn
