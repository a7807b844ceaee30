"""Exercise step_seconds of chapter 17 (core, 10 points, about 15 minutes).

Predict the time of one decode step: max(bytes / bandwidth, FLOPs / peak) + overhead. The
weights are read once for the whole batch. Each of the `batch` sequences has `context` tokens,
and its keys and values are read once, in all layers. Each sequence computes one token: two
FLOPs for each weight that it is multiplied with, and in each layer, for each query head and
each token of the context, two FLOPs per dimension for the score and two for the mix of values.
The check takes five pairs of a model and a card.

Check it:     minigen check exercises/17_dense_cache/step_seconds.py
With a hint:  minigen check exercises/17_dense_cache/step_seconds.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen_course.ch17_dense_cache.figures import seconds_by_batch
    from minigen_course.figures.explore import picture

    with using(17, step_seconds=mine):
        drawn = seconds_by_batch([100, 1000, 8000])
    picture(drawn, "The time of a step by its batch, each point computed by your function.")

Harder: Predict the time to the first token as well. It is the exercise `prefill_seconds`, in
the workspace.
"""

# exercise: minigen_course.ch17_dense_cache.estimates.step_seconds
def step_seconds(
    *,
    weights: float,
    layers: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    batch: int,
    context: int,
    bandwidth: float,
    peak: float,
    weight_bits: float = 16,
    kv_bits: float = 16,
    overhead: float = 0.0,
) -> float:
    """Return the predicted time of one decode step in seconds.

    `weights` are the parameters that each token is multiplied with; each of `batch` sequences has
    `context` tokens. `bandwidth` is in bytes per second, `peak` in FLOPs per second, `overhead` in
    seconds.
    """
    raise NotImplementedError  # your turn
