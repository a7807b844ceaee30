"""Log probabilities of the output's tokens as they are sampled, and of the prompt's tokens."""

from collections.abc import Sequence as SequenceOf

import torch
from jaxtyping import Float
from torch import Tensor

from minigen.sequence import Logprob, ScheduledChunk, Sequence


def chosen_logprobs(
    logits: Float[Tensor, "rows vocab"], token_ids: SequenceOf[int], sequences: SequenceOf[Sequence]
) -> list[dict[int, Logprob] | None]:
    """Return the logprobs of each row's chosen and most likely tokens; None if not requested."""
    found: list[dict[int, Logprob] | None] = [None] * len(sequences)
    for row, sequence in enumerate(sequences):
        if sequence.params.logprobs is None:
            continue
        found[row] = logprobs_of(logits[row], token_ids[row], sequence.params.logprobs)
    return found


def record_prompt_logprobs(
    logits: Float[Tensor, "rows vocab"], chunks: SequenceOf[ScheduledChunk]
) -> Float[Tensor, "samples vocab"]:
    """Append the chunks' prompt logprobs to their sequences; return the rows to sample from."""
    row = 0
    sampled: list[int] = []
    for chunk in chunks:
        sequence = chunk.sequence
        for token in chunk.prompt_logprob_rows:
            next_id = sequence.token_ids[sequence.num_computed + token + 1]
            num_likeliest = sequence.params.prompt_logprobs or 0
            sequence.prompt_logprobs.append(logprobs_of(logits[row], next_id, num_likeliest))
            row += 1
        sampled += range(row, row := row + len(chunk.samples) + len(chunk.drafts))
    return logits[sampled]


def logprobs_of(
    logits: Float[Tensor, " vocab"], token_id: int, num_likeliest: int
) -> dict[int, Logprob]:
    """Return the log probabilities of one token and of the most likely tokens, by token id."""
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs[token_id]
    rank = int((logprobs > chosen).sum()) + 1
    top = logprobs.topk(min(num_likeliest, len(logprobs)))
    ranks = torch.searchsorted(-top.values, -top.values) + 1  # equal logprobs share a rank
    return {token_id: Logprob(float(chosen), rank)} | {
        likely: Logprob(value, place)
        for likely, value, place in zip(
            top.indices.tolist(), top.values.tolist(), ranks.tolist(), strict=True
        )
    }
