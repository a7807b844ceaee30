"""Three small logits processors: a ban, a watermark with its detector, and a moderation hook.

Each is a factory for `LLM.load(logits_processor=...)`: it is called with (params, prompt_ids) for
each request. They are short on purpose, to be read and changed. Sources: Kirchenbauer and others,
"A Watermark for Large Language Models" (arXiv:2301.10226), for the watermark and its z-score.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool

from minigen.sampling.processors import Logits

_MIXERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of splitmix64


@dataclass(frozen=True)
class Ban:
    """Forbids sequences of tokens: the last token of one, where its other tokens came before.

    A text can have several tokenizations, with and without a space before it, for example; each
    is a sequence of its own.
    """

    sequences: tuple[tuple[int, ...], ...]

    def __call__(self, params: Any, prompt_ids: tuple[int, ...]) -> Callable[..., Logits]:
        """Return the processor of an answer."""
        return self.apply

    def apply(self, logits: Logits, output_ids: SequenceOf[int]) -> Logits:
        """Forbid the tokens that would complete a banned sequence."""
        output = tuple(output_ids)
        for *before, last in self.sequences:
            if output[len(output) - len(before) :] == tuple(before):
                logits[last] = -math.inf
        return logits


@dataclass(frozen=True)
class Watermark:
    """Prefers tokens of a "green" list that the token before decides, so that texts can be known.

    `key` is the secret, `share` the green part of the vocabulary, and `bias` what is added to the
    logits of green tokens. An answer's first token is left alone.
    """

    key: int
    share: float = 0.5
    bias: float = 2.0

    def __call__(self, params: Any, prompt_ids: tuple[int, ...]) -> Callable[..., Logits]:
        """Return the processor of an answer."""
        return self.apply

    def apply(self, logits: Logits, output_ids: SequenceOf[int]) -> Logits:
        """Add the bias to the tokens that are green after the last one."""
        if output_ids:
            green = self.green(output_ids[-1], np.arange(len(logits)))
            logits[torch.from_numpy(green).to(logits.device)] += self.bias
        return logits

    def green(self, before: int, token_ids: np.ndarray) -> Bool[np.ndarray, " tokens"]:
        """Return which tokens are green after the token `before`."""
        secret = np.uint64((self.key * _MIXERS[1] + before * _MIXERS[2]) % 2**64)
        x = token_ids.astype(np.uint64) * np.uint64(_MIXERS[0]) + secret
        for shift, mixer in ((30, _MIXERS[1]), (27, _MIXERS[2])):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(mixer)
        return (x ^ (x >> np.uint64(31))) < np.uint64(int(self.share * 2**64))

    def z_score(self, token_ids: SequenceOf[int]) -> float:
        """Return by how many standard deviations a text has more green tokens than by chance.

        A repeated pair of tokens counts once, since it is one draw. One text in 30,000 that has
        no watermark scores above 4.
        """
        pairs = set(itertools.pairwise(token_ids))
        if not pairs:
            return 0.0
        greens = sum(bool(self.green(a, np.array([b]))[0]) for a, b in pairs)
        spread = math.sqrt(len(pairs) * self.share * (1 - self.share))
        return (greens - len(pairs) * self.share) / spread


@dataclass(frozen=True)
class Moderation:
    """Ends an answer that a judge finds wrong: only `end_id` may then come.

    `judge` gets the answer's token ids at every `interval` tokens; its time is the step's, so it
    must be short.
    """

    judge: Callable[[SequenceOf[int]], bool]
    end_id: int
    interval: int = 8

    def __call__(self, params: Any, prompt_ids: tuple[int, ...]) -> Callable[..., Logits]:
        """Return the processor of an answer."""
        return self.apply

    def apply(self, logits: Logits, output_ids: SequenceOf[int]) -> Logits:
        """Leave only the end token if the judge says so."""
        due = output_ids and len(output_ids) % self.interval == 0
        if due and self.judge(output_ids):
            ended = torch.full_like(logits, -math.inf)
            ended[self.end_id] = 0.0
            return ended
        return logits


def banned_texts(texts: Iterable[str], encode: Callable[[str], SequenceOf[int]]) -> Ban:
    """Return the ban of texts, each also with a space before it; `encode` tokenizes."""
    spelled = [form for text in texts for form in (text, f" {text}")]
    return Ban(tuple(dict.fromkeys(tuple(encode(form)) for form in spelled)))
