"""Exercise choose_all_reduce of chapter 41 (warm-up, 5 points, about 10 minutes).

Say how an all-reduce should be done: by a ring or by a tree. Return the pair of a word and
seconds: `("ring", t_ring)` or `("tree", t_tree)`, whichever is faster by the chapter's formulas
for a ring and a tree. If both take equally long, return the ring. A single rank sends nothing,
so its ring takes 0 seconds.

Check it:     minigen check exercises/41_tensor_parallel/choose_all_reduce.py
With a hint:  minigen check exercises/41_tensor_parallel/choose_all_reduce.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    from minigen_course.ch41_tensor_parallel.lesson import LINKS

    for name, link in LINKS.items():
        print(name, mine(16_384, 8, link.latency, link.bandwidth))

Harder: Set the two formulas equal, and solve for the bytes. From which message size on is the
ring faster on 8 ranks over NVLink 4 (between NVIDIA's GPUs), with 2 µs and 450 GB/s? How many
tokens of Llama-3-70B's 8,192 numbers in bfloat16 is that?
"""

# exercise: minigen_course.ch41_tensor_parallel.lesson.choose_all_reduce
def choose_all_reduce(
    num_bytes: float, num_ranks: int, latency: float, bandwidth: float
) -> tuple[str, float]:
    """Return "ring" or "tree", whichever takes fewer seconds, and these seconds.

    If both take equally long, it is a ring. The latency is in seconds per turn, the bandwidth in
    bytes per second.
    """
    raise NotImplementedError  # your turn
