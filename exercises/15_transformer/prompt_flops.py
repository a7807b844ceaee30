"""Exercise prompt_flops of chapter 15 (stretch, 15 points, about 10 minutes).

Count the FLOPs of a whole prompt of `num_tokens` tokens. Each token attends to itself and to
those before it, and scores that the causal mask hides are not computed. Only the last token
gets logits. `token_flops` in `minigen_course.ch15_transformer.reference` counts one token with
its logits. Return an int.

Check it:     minigen check exercises/15_transformer/prompt_flops.py
With a hint:  minigen check exercises/15_transformer/prompt_flops.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    from minigen_course.lab.cost_model import config_of

    for num_tokens in (100, 1_000, 8_192):
        flops = mine(config_of("Llama-3-8B"), num_tokens)
        print(f"Llama-3-8B, a prompt of {num_tokens:>5,} tokens: {flops / 1e12:8,.1f} TFLOP")

Harder: Find a formula without a sum. From which length on does attention without its matrices
cost more than all matrices together?
"""

# exercise: minigen_course.ch15_transformer.reference.prompt_flops
from minigen.checkpoint.model_config import ModelConfig


def prompt_flops(config: ModelConfig, num_tokens: int) -> int:
    """Return the FLOPs of a whole prompt, with logits for its last token only.

    Each token attends to itself and to those before it, and nothing that the causal mask hides is
    computed.
    """
    raise NotImplementedError  # your turn
