"""Exercise flash_attention of chapter 32 (core, 10 points, about 25 minutes).

Write attention as a loop over tiles. Take `tile` queries at a time, and for them take `tile`
keys at a time, from the first key that one of these queries sees to the position of the last
query. Import `attend_tile`, `merge` and `nothing_seen` from
`minigen_course.ch32_flash_attention.flash`, and chapter 14's `causal_mask` from
`minigen.model.attention`.

Check it:     minigen check exercises/32_flash_attention/flash_attention.py
With a hint:  minigen check exercises/32_flash_attention/flash_attention.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen import SamplingParams
    from minigen_course import load_model
    from minigen_course.grading.plug_in import attend_by

    llm = load_model(weights="float32", attention_backend=attend_by(mine))
    print(llm.generate("The old lighthouse", SamplingParams(temperature=0, max_tokens=24)).text)

Harder: Exchange the two loops: keys outside, queries inside. What must you then store for every
query, and why do GPU kernels have the queries outside?
"""

# exercise: minigen_course.ch32_flash_attention.flash.flash_attention
from jaxtyping import Float
from torch import Tensor


def flash_attention(
    q: Float[Tensor, "tokens q_heads head_dim"],
    k: Float[Tensor, "context kv_heads head_dim"],
    v: Float[Tensor, "context kv_heads head_dim"],
    window: int | None = None,
    tile: int = 64,
) -> Float[Tensor, "tokens q_heads head_dim"]:
    """Compute causal attention as in chapter 14, at most `tile` queries by `tile` keys at a time.

    The queries are the last `tokens` positions of the context. A tile of queries does not read the
    keys and values that none of its queries sees. Apart from the data of one tile and the mask of
    its queries, no tensor that is allocated is larger than the result.
    """
    raise NotImplementedError  # your turn
