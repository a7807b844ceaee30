"""Two wrong versions of attention, for experiments, and weights scaled by what they fetch."""

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional


def alone(
    q: Float[Tensor, "tokens q_heads head_dim"],
    k: Float[Tensor, "context kv_heads head_dim"],
    v: Float[Tensor, "context kv_heads head_dim"],
    window: int | None = None,
) -> Float[Tensor, "tokens q_heads head_dim"]:
    """Return each token's own value, and nothing of the others; `k` and `window` are not used."""
    return v[-len(q) :].repeat_interleave(q.shape[1] // v.shape[1], dim=1)


def unmasked(
    q: Float[Tensor, "tokens q_heads head_dim"],
    k: Float[Tensor, "context kv_heads head_dim"],
    v: Float[Tensor, "context kv_heads head_dim"],
    window: int | None = None,
) -> Float[Tensor, "tokens q_heads head_dim"]:
    """Return attention in which each query sees all keys, later ones, too; `window` is not used."""
    q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


def by_length(
    weights: Float[Tensor, "layers q_heads queries keys"],
    lengths: Float[Tensor, "layers keys kv_heads"],
) -> Float[Tensor, "layers q_heads queries keys"]:
    """Multiply each weight by the length of the value that it fetches."""
    group = weights.shape[1] // lengths.shape[2]
    of_heads = lengths.repeat_interleave(group, dim=2).transpose(1, 2)
    return weights * of_heads.unsqueeze(2)
