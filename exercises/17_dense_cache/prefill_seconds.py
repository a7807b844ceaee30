"""Exercise prefill_seconds of chapter 17 (stretch, 15 points, about 15 minutes).

Predict the time to the first token of one prompt: max(bytes / bandwidth, FLOPs / peak) +
overhead. All tokens of the prompt are computed in one step. Each token attends to itself and to
all before it. The output head, whose weights are a part of `weights`, is multiplied with the
last token only. The weights are read once, and so are the keys and values of the prompt.

Check it:     minigen check exercises/17_dense_cache/prefill_seconds.py
With a hint:  minigen check exercises/17_dense_cache/prefill_seconds.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    from minigen_course.lab.cost_model import MACHINES, SHAPES

    shape, card = SHAPES["Llama-3-8B"], MACHINES["L4"]
    sizes = {name: getattr(shape, name) for name in ("layers", "q_heads", "kv_heads", "head_dim")}
    limits = {"bandwidth": card.bandwidth, "peak": card.flops}
    for tokens in (100, 1000, 10_000):
        seconds = mine(
            weights=shape.multiplied, head=shape.vocab * shape.hidden, prompt_tokens=tokens, **sizes, **limits
        )
        print(f"{tokens:>6,} tokens of Llama-3-8B on an L4: first token after {1e3 * seconds:,.0f} ms")

Harder: The first 1,000 tokens of a prompt of 1,500 are cached already (chapter 23). Which of
your terms change, and by how much is the first token earlier?
"""

# exercise: minigen_course.ch17_dense_cache.estimates.prefill_seconds
def prefill_seconds(
    *,
    weights: float,
    head: float,
    layers: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    prompt_tokens: int,
    bandwidth: float,
    peak: float,
    weight_bits: float = 16,
    kv_bits: float = 16,
    overhead: float = 0.0,
) -> float:
    """Return the predicted time to the first token of one prompt, in seconds.

    The whole prompt is one step, and only its last token is multiplied with the `head`, which is
    part of `weights`. Each token attends to itself and all before it. All keys and values are
    counted once as bytes. The other arguments are those of `step_seconds`.
    """
    raise NotImplementedError  # your turn
