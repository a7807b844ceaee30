"""Exercise qwen3_logits of chapter 15 (stretch, 15 points, about 35 minutes).

Port a model: write the whole forward pass of Qwen3, from its tensors by their names to the
logits after each token. Qwen3 is a Llama-type model with two differences. Each head of the
queries and of the keys is normalised by RMSNorm before it is rotated; the weights are
`model.layers.0.self_attn.q_norm.weight` and `k_norm.weight`, of `head_dim` numbers, and so on
for each layer. And `head_dim` x `q_heads` need not be `hidden`. The other tensors have the
names that the chapter prints. If `config.tied_embeddings`, the head is the embedding, else it
is `lm_head.weight`. There are no biases and no sliding windows. `config` also has `norm_eps`
(for all norms), `rope_theta`, `num_layers` and `head_dim`. The parts are in
`minigen.model.layers` (`rms_norm`, `rotary_frequencies`, `rotary_tables`, `apply_rotary`,
`swiglu`), and `attention(q, k, v)` is in `minigen.model.attention`.

Check it:     minigen check exercises/15_transformer/qwen3_logits.py
With a hint:  minigen check exercises/15_transformer/qwen3_logits.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    from minigen_course.ch15_transformer.lesson import tiny_model

    tiny = tiny_model("qwen3", tie_word_embeddings=True)
    found = mine(tiny.config, tiny.weights, [3, 1, 4])
    print("largest difference from the package:", float((found - tiny.logits([3, 1, 4])).abs().max()))

Harder: Let your function run Llama, Qwen2 (biases for queries, keys and values, and no norms
per head) and Mistral (a sliding window), too: the names of the tensors and
`config.sliding_windows` say what to do. `tiny_model("llama")`, `tiny_model("qwen2")` and
`tiny_model("mistral", sliding_window=3)` in `minigen_course.ch15_transformer.lesson` have
weights, and logits to compare with.
"""

# exercise: minigen_course.ch15_transformer.reference.qwen3_logits
from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor

from minigen.checkpoint.model_config import ModelConfig


def qwen3_logits(
    config: ModelConfig, weights: Mapping[str, Tensor], token_ids: list[int]
) -> Float[Tensor, "tokens vocab"]:
    """Return the logits after each token of a text, from a Qwen3 model's tensors by their names."""
    raise NotImplementedError  # your turn
