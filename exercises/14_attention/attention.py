"""Exercise attention of chapter 14 (core, 10 points, about 30 minutes).

Write causal attention: softmax(q k^T / sqrt(head_dim)) v for every head, where query head h
uses KV head h // (q_heads / kv_heads). The queries are at the last `tokens` positions of the
context. A query sees its own position and those before it; with a window, it sees at most
`window` positions, including its own.

Check it:     minigen check exercises/14_attention/attention.py
With a hint:  minigen check exercises/14_attention/attention.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen import SamplingParams
    from minigen_course import load_model

    llm = load_model(weights="float32", enable_prefix_caching=False)
    with using(14, attention=mine):
        print(llm.generate("The old lighthouse", SamplingParams(temperature=0, max_tokens=24)).text)

Harder: Write it without repeating K and V, and take the keys 16 at a time (a tile), so that no
whole row of scores is ever stored; the same check accepts it. Besides the sum of weighted
values, which two numbers per query must be carried from tile to tile?
"""

# exercise: minigen.model.attention.attention
from jaxtyping import Float
from torch import Tensor


def attention(
    q: Float[Tensor, "tokens q_heads head_dim"],
    k: Float[Tensor, "context kv_heads head_dim"],
    v: Float[Tensor, "context kv_heads head_dim"],
    window: int | None = None,
) -> Float[Tensor, "tokens q_heads head_dim"]:
    """Return softmax(q k^T / sqrt(head_dim)) v of each query over the keys that it may attend to.

    The queries are the last `tokens` positions of the context. Query head h uses KV head
    h // (q_heads / kv_heads). With a window, a query attends to at most `window` positions,
    including its own.
    """
    raise NotImplementedError  # your turn
