"""The sampling kernel for the engine: what sequences ask for as arrays, and tokens back."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from minigen.kernels.compiled import choose_rows, likeliest_rows
from minigen.kernels.sample import Asked, make_room
from minigen.kernels.threads import available_threads, team_of
from minigen.params import SamplingParams
from minigen.sampling import uniform_draws
from minigen.sequence import Sequence


class KernelChooser:
    """Chooses tokens as `minigen.sampling.choose_tokens` does, a thread for each row."""

    def __init__(self, vocab: int, num_threads: int):
        self.vocab = vocab
        self.num_threads = available_threads(num_threads)
        self._room = make_room(self.num_threads, vocab)

    def __call__(
        self, logits: Float[Tensor, "rows vocab"], sequences: SequenceOf[Sequence]
    ) -> list[int]:
        """A token for each row; -1 where its logits are not finite."""
        flat, out = logits.numpy().reshape(-1), np.empty(len(sequences), np.int64)
        plain = all(sequence.params.plainly_greedy for sequence in sequences)
        team = team_of(min(self.num_threads, len(out)))
        if plain:
            team.run(1, likeliest_rows, flat, self.vocab, out)
        else:
            asked = asked_of(sequences, self.vocab)
            team.run(1, choose_rows, flat, self.vocab, asked, self._room, out)
        found: list[int] = out.tolist()
        return found


def asked_of(sequences: SequenceOf[Sequence], vocab: int) -> Asked:
    """What the sequences ask for, a row each."""
    params = [sequence.params for sequence in sequences]
    seen = [each.token_ids if each.params.has_penalties else [] for each in sequences]
    banned = [sequence.banned_ids for sequence in sequences]
    biased = [list(each.logit_bias) for each in params]
    biases = [bias for each in params for bias in each.logit_bias.values()]
    return Asked(
        temperature=np.array([_temperature(each) for each in params], np.float32),
        top_k=np.array([min(each.top_k or vocab, vocab) for each in params]),
        top_p=np.array([each.top_p for each in params], np.float64),
        min_p=np.array([each.min_p for each in params], np.float32),
        uniform=uniform_draws(
            [sequence.seed for sequence in sequences],
            [sequence.choice for sequence in sequences],
            [len(sequence.output_ids) for sequence in sequences],
        ).numpy(),
        penalties=np.array(
            [
                (each.repetition_penalty, each.presence_penalty, each.frequency_penalty)
                for each in params
            ],
            np.float32,
        ),
        seen_starts=_starts(seen),
        seen=_flat(seen),
        num_prompt=np.array([len(each.prompt_ids) for each in sequences]),
        biased_starts=_starts(biased),
        biased=_flat(biased),
        biases=np.array(biases, np.float32),
        banned_starts=_starts(banned),
        banned=_flat(banned),
    )


def _temperature(params: SamplingParams) -> float:
    """0 for greedy alone: what is above 0 stays so in float32."""
    return 0.0 if params.greedy else max(params.temperature, float(np.finfo(np.float32).tiny))


def _starts(lists: Iterable[Any]) -> np.ndarray:
    """Where each list begins in all of them laid end to end, and where the last ends."""
    return np.cumsum([0, *(len(each) for each in lists)])


def _flat(lists: Iterable[Iterable[int]]) -> np.ndarray:
    return np.array([number for each in lists for number in each], np.int64)
