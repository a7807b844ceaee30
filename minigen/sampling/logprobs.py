"""How likely the model held tokens: those of the output as they come, those of the prompt."""

from collections.abc import Sequence as SequenceOf

import torch
from jaxtyping import Float
from torch import Tensor

from minigen.sequence import Logprob, ScheduledChunk, Sequence


def chosen_logprobs(
    logits: Float[Tensor, "rows vocab"], token_ids: SequenceOf[int], sequences: SequenceOf[Sequence]
) -> list[dict[int, Logprob] | None]:
    """For the rows that ask: the chosen token's and the likeliest tokens' log probabilities."""
    found: list[dict[int, Logprob] | None] = [None] * len(sequences)
    for row, sequence in enumerate(sequences):
        if sequence.params.logprobs is None:
            continue
        found[row] = logprobs_of(logits[row], token_ids[row], sequence.params.logprobs)
    return found


def record_prompt_logprobs(
    logits: Float[Tensor, "rows vocab"], chunks: SequenceOf[ScheduledChunk]
) -> Float[Tensor, "samples vocab"]:
    """Give sequences what the chunks' `prompt_logprob_rows` say of their prompts; returns the other rows."""
    row = 0
    sampled: list[int] = []
    for chunk in chunks:
        sequence, told = chunk.sequence, chunk.prompt_logprob_rows
        for token in told:
            next_id = sequence.token_ids[sequence.num_computed + token + 1]
            num_likeliest = sequence.params.prompt_logprobs or 0
            sequence.prompt_logprobs.append(logprobs_of(logits[row], next_id, num_likeliest))
            row += 1
        sampled += range(row, row := row + len(chunk.samples))
    return logits[sampled]


def logprobs_of(
    logits: Float[Tensor, " vocab"], token_id: int, num_likeliest: int
) -> dict[int, Logprob]:
    """The log probabilities of one token and of the likeliest ones, by id."""
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs[token_id]
    rank = int((logprobs > chosen).sum()) + 1
    top = logprobs.topk(min(num_likeliest, len(logprobs)))
    ranks = torch.searchsorted(-top.values, -top.values) + 1  # equal ones share a rank
    return {token_id: Logprob(float(chosen), rank)} | {
        likely: Logprob(value, place)
        for likely, value, place in zip(
            top.indices.tolist(), top.values.tolist(), ranks.tolist(), strict=True
        )
    }
