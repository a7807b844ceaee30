"""Exercise DenseCache of chapter 17 (core, 10 points, about 20 minutes).

Write the KV cache of one sequence. `store` appends a layer's new keys and values to the old
ones, and returns all keys and values of that layer: two tensors, or one tensor with keys and
values along its first axis. All layers of a step store the same tokens, one layer after
another; then `advance` is called once, and adds these tokens to the attribute `num_tokens`,
which begins at 0. The cache has room for `max_tokens` tokens, and stores copies, in its own
`dtype`.

Check it:     minigen check exercises/17_dense_cache/dense_cache.py
With a hint:  minigen check exercises/17_dense_cache/dense_cache.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen_course import load_model
    from minigen_course.ch17_dense_cache.lesson import continue_dense

    llm = load_model(weights="float32")
    with using(17, DenseCache=mine):
        token_ids = continue_dense(llm, "The history of the sea begins", 12)
    print(llm.tokenizer.decode(token_ids))

Harder: A layer with a sliding window never attends to older tokens than its window holds. Write
a cache that keeps only these: it is the exercise `WindowCache`, in the workspace.
"""

# exercise: minigen_course.ch17_dense_cache.reference.DenseCache
import torch
from jaxtyping import Float
from torch import Tensor


class DenseCache:
    """Keys and values of one sequence, `[2, layers, max_tokens, kv_heads, head_dim]`."""

    def __init__(
        self, layers: int, max_tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ):
        raise NotImplementedError  # your turn

    def store(
        self,
        layer_id: int,
        k: Float[Tensor, "tokens kv_heads head_dim"],
        v: Float[Tensor, "tokens kv_heads head_dim"],
    ) -> Float[Tensor, "2 context kv_heads head_dim"]:
        """Append one layer's new keys and values to the old ones; return all of them."""
        raise NotImplementedError  # your turn

    def advance(self, num_tokens: int) -> None:
        """Count the new tokens, once every layer has stored them."""
        raise NotImplementedError  # your turn
