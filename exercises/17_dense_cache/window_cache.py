"""Exercise WindowCache of chapter 17 (stretch, 15 points, about 20 minutes).

Write the cache of a model whose layers have a sliding window: each token attends to the last
`window` tokens, itself included. The tokens come one by one. `store` adds one token's key and
value to a layer, and returns the keys and values of the layer's last `window` tokens (fewer at
the beginning), in any order, but each value beside its key: two tensors, or one tensor with
keys and values along its first axis. All layers store the same token, and then `advance` is
called once. The cache stores copies, in its own `dtype`.

Check it:     minigen check exercises/17_dense_cache/window_cache.py
With a hint:  minigen check exercises/17_dense_cache/window_cache.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    import torch

    cache = mine(1, 3, 1, 2, torch.float32)
    for token in range(5):
        k = torch.full((1, 1, 2), float(token))
        keys, _ = cache.store(0, k, k)
        cache.advance()
        print(f"token {token}: the cache holds the tokens {[int(each) for each in keys[:, 0, 0]]}")

Harder: Now a prompt of several tokens comes at once. Its first tokens need older keys than its
last ones: how many tokens must the cache hold during that step?
"""

# exercise: minigen_course.ch17_dense_cache.reference.WindowCache
import torch
from jaxtyping import Float
from torch import Tensor


class WindowCache:
    """Keys and values of one sequence's last tokens, `[2, layers, window, kv_heads, head_dim]`."""

    def __init__(self, layers: int, window: int, kv_heads: int, head_dim: int, dtype: torch.dtype):
        raise NotImplementedError  # your turn

    def store(
        self,
        layer_id: int,
        k: Float[Tensor, "1 kv_heads head_dim"],
        v: Float[Tensor, "1 kv_heads head_dim"],
    ) -> Float[Tensor, "2 context kv_heads head_dim"]:
        """Add one token to a layer; return its last `window` tokens, in any order."""
        raise NotImplementedError  # your turn

    def advance(self) -> None:
        """Count the new token, once every layer has stored it."""
        raise NotImplementedError  # your turn
