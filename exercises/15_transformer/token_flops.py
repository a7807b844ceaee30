"""Exercise token_flops of chapter 15 (warm-up, 5 points, about 10 minutes).

Count the FLOPs of one token's forward pass from a model's sizes alone. A product of a vector
with a matrix costs two FLOPs per weight of the matrix. Count the four matrices of attention,
the three of the feed-forward network and the head; looking up the embedding costs nothing. Add
what attention computes without weights: for each layer, each query head and each of the
`context` tokens that the token attends to (itself included), one score and one share of the
mix. Norms, rotation and softmax are left out. `config` has `hidden`, `num_layers`, `q_heads`,
`kv_heads`, `head_dim`, `ffn` and `vocab_size`. Return an int.

Check it:     minigen check exercises/15_transformer/token_flops.py
With a hint:  minigen check exercises/15_transformer/token_flops.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen_course.ch15_transformer.figures import attention_share
    from minigen_course.figures.explore import picture

    with using(15, token_flops=mine):
        drawn = attention_share(["SmolLM2-135M", "Llama-3-8B", "Llama-3-70B"])
    picture(drawn, "Attention's share of one token's FLOPs, computed by your function.")

Harder: Count a whole prompt whose last token alone gets logits, where each token attends to
itself and to those before it: that is the exercise `prompt_flops`.
"""

# exercise: minigen_course.ch15_transformer.reference.token_flops
from minigen.checkpoint.model_config import ModelConfig


def token_flops(config: ModelConfig, context: int) -> int:
    """Return the FLOPs of one token's forward pass, from its embedding to its logits.

    The token attends to `context` tokens, including itself. Only matrix products count, and a
    multiplication and an addition are two FLOPs.
    """
    raise NotImplementedError  # your turn
