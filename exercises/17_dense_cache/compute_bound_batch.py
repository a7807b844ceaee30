"""Exercise compute_bound_batch of chapter 17 (warm-up, 5 points, about 5 minutes).

At which batch does decoding become compute-bound? The model is Llama-3-8B with weights and KV
cache in bfloat16: it multiplies each token with 7.505 billion weights, and has 32 layers, 32
query heads, 8 KV heads and a head dimension of 128. The card is an L4: 300 GB/s and 121
TFLOP/s. Return the batch for a `context` of 1, 100, 1,000 and 8,000 tokens, or None where no
batch is compute-bound. Work it out on paper and return your four numbers, or let the function
compute them; 5 % off is near enough.

Check it:     minigen check exercises/17_dense_cache/compute_bound_batch.py
With a hint:  minigen check exercises/17_dense_cache/compute_bound_batch.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen_course.ch17_dense_cache.figures import seconds_by_batch
    from minigen_course.figures.explore import picture

    with using(17, compute_bound_batch=mine):
        drawn = seconds_by_batch([100, 1000, 8000])
    picture(drawn, "The time of a step by its batch. Dots are the batches of your function.")

Harder: An L4 has 24 GB. Does the batch for 100 tokens fit beside the 16.06 GB of weights? What
does that say about decoding on this card?
"""

# exercise: minigen_course.ch17_dense_cache.estimates.compute_bound_batch
def compute_bound_batch(context: int) -> int | None:
    """Return the least batch at which decoding is compute-bound, or None if no batch is.

    The model is Llama-3-8B with weights and KV cache in bfloat16, the card is an L4, and each
    sequence has `context` tokens.
    """
    raise NotImplementedError  # your turn
