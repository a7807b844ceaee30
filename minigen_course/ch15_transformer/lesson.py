"""The logit lens: what each layer of a model would predict if it were the last.

Source: nostalgebraist 2020, "interpreting GPT: the logit lens".
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from minigen.llm import LLM
from minigen_course.lab.inspect_model import recorded_states, transformer_of

FOLLOWED = 5  # likeliest tokens of the last layer that are followed, per position


@dataclass(frozen=True)
class Lens:
    """Each layer's prediction of the next token at each position; row 0 is the embedding alone.

    `token_ids` is the text; `likeliest` is each layer's likeliest token, and `probability` its
    probability; `entropy` is in bits. `final` are the last layer's likeliest tokens, in order, and
    `final_probability` are the probabilities that each layer gives to them.
    """

    token_ids: Int64[Tensor, " tokens"]
    likeliest: Int64[Tensor, "states tokens"]
    probability: Float[Tensor, "states tokens"]
    entropy: Float[Tensor, "states tokens"]
    final: Int64[Tensor, "tokens followed"]
    final_probability: Float[Tensor, "states tokens followed"]


@torch.inference_mode()
def look(llm: LLM, text: str, max_tokens: int = 12) -> Lens:
    """Apply the final norm and the head to every layer's hidden states of `text`.

    Raises `ValueError` for a text of no tokens, or of more than `max_tokens`.
    """
    token_ids = llm.tokenizer.encode(text)
    if not token_ids:
        raise ValueError("Write at least one word.")
    if len(token_ids) > max_tokens:
        raise ValueError(f"That is {len(token_ids)} tokens; at most {max_tokens} can be drawn.")
    states = recorded_states(llm, token_ids)
    model = transformer_of(llm)
    final = model.logits(states[-1]).topk(FOLLOWED).indices
    rows = []
    for state in states:  # a layer at a time: all of them would take much memory
        logs = model.logits(state).log_softmax(-1)
        top = logs.max(-1)
        entropy = -(logs.exp() * logs).sum(-1) / torch.log(torch.tensor(2.0))
        rows.append((top.indices, top.values.exp(), entropy, logs.gather(-1, final).exp()))
    likeliest, probability, entropy, followed = (
        torch.stack(each) for each in zip(*rows, strict=True)
    )
    return Lens(torch.tensor(token_ids), likeliest, probability, entropy, final, followed)
