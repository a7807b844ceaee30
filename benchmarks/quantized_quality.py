"""What `35_quantization.py` measures with: texts, and how far a quantized model is from its own."""

import math
import pydoc_data.topics
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from minigen.checkpoint.checkpoint import Checkpoint
from minigen.model.attention import attend_packed
from minigen.model.layers import rms_norm, rotary_tables
from minigen.model.transformer import MakeLinear, build_frequencies, build_layer, run_layer
from minigen.quantization.calibration import replaced_linear
from minigen_course.lab.texts import ALICE

Windows = Sequence[Tensor]  # token ids, [tokens] each
ROWS = 128  # rows of logits at a time
RESAMPLES = 10_000


def split_texts() -> tuple[str, str]:
    """Return a text to calibrate on and one to measure on, from the topics of Python's `help()`.

    Every second topic is measured. Topics quote each other, so paragraphs that occur in a measured
    topic are left out of the others.
    """
    topics = pydoc_data.topics.topics
    names = sorted(topics)
    held_out = "\n\n".join(topics[name].strip() for name in names[1::2])
    seen = {each.strip() for each in held_out.split("\n\n")}
    kept = [
        paragraph
        for name in names[::2]
        for paragraph in topics[name].strip().split("\n\n")
        if paragraph.strip() not in seen
    ]
    return "\n\n".join(kept), held_out


def windows_of(checkpoint: Checkpoint, text: str, length: int, count: int | None) -> list[Tensor]:
    """Return windows of `length` tokens, `count` of them evenly spread, without a first token.

    No BOS is added; windows do not overlap.
    """
    ids = torch.tensor(checkpoint.tokenizer().encode(text, add_special_tokens=False))
    whole = list(ids[: len(ids) // length * length].split(length))
    if count is None or count >= len(whole):
        return whole
    return [whole[i * len(whole) // count] for i in range(count)]


def evaluation_texts(checkpoint: Checkpoint, count: int) -> dict[str, list[Tensor]]:
    """Return the windows that are measured, by the name of their text."""
    return {
        "held-out topics": windows_of(checkpoint, split_texts()[1], 512, count),
        "Alice": windows_of(checkpoint, ALICE, 128, None),
    }


class Lazy(Mapping[str, Tensor]):
    """Weights by name that are dequantized when they are read."""

    def __init__(self, makers: Mapping[str, Callable[[], Tensor]]):
        self.makers = makers

    def __getitem__(self, name: str) -> Tensor:
        return self.makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.makers)

    def __len__(self) -> int:
        return len(self.makers)


@dataclass(frozen=True)
class Quality:
    """Means per window and token: negative log-likelihood, KL divergence, same likeliest token."""

    nll: list[float]
    divergence: list[float]
    agreement: list[float]

    @property
    def perplexity(self) -> float:
        """Exp of the mean negative log-likelihood; the windows are equally long."""
        return math.exp(sum(self.nll) / len(self.nll))

    def summary(self) -> dict[str, object]:
        """Return the figures for the JSON: means, and bootstrap intervals over windows."""
        low, high = interval(self.nll)
        return {
            "perplexity": self.perplexity,
            "perplexity interval": [math.exp(low), math.exp(high)],
            "kl divergence": sum(self.divergence) / len(self.divergence),
            "kl interval": interval(self.divergence),
            "same top token": sum(self.agreement) / len(self.agreement),
            "kl by window": self.divergence,
            "nll by window": self.nll,
        }


def interval(values: Sequence[float], resamples: int = RESAMPLES) -> list[float]:
    """Return the 95 % bootstrap interval of the mean, by percentiles; the seed is fixed."""
    rng = random.Random(0)
    means = sorted(sum(rng.choices(values, k=len(values))) / len(values) for _ in range(resamples))
    return [means[int(0.025 * resamples)], means[int(0.975 * resamples)]]


def compare(first: Sequence[float], second: Sequence[float]) -> dict[str, object]:
    """Compare two methods on the same windows: the mean of first - second, paired by window."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    low, high = interval(differences)
    return {
        "difference": sum(differences) / len(differences),
        "interval": [low, high],
        "verdict": "larger" if low > 0 else "smaller" if high < 0 else "undecided",
    }


class Judge:
    """Runs a checkpoint with some weights replaced, and compares it with the checkpoint itself."""

    def __init__(self, checkpoint: Checkpoint, windows: Windows):
        self.config, self.tensors = checkpoint.config, checkpoint.tensors
        self.windows = windows
        self.embedding = self.tensors["model.embed_tokens.weight"].dequantize()
        tied = self.config.tied_embeddings
        self.head = self.embedding if tied else self.tensors["lm_head.weight"].dequantize()
        self.norm = self.tensors["model.norm.weight"].dequantize()
        self.frequencies = build_frequencies(self.config, self.tensors)
        self.states: list[list[Tensor]] = []  # of the checkpoint itself, before each layer
        self.reference = self.run(replaced_linear({}), keep=True)

    @torch.inference_mode()
    def run(self, make_linear: MakeLinear, first: int = 0, *, keep: bool = False) -> list[Tensor]:
        """Return the last hidden states of each window; layers before `first` are not run."""
        states = self.states[first] if first else [self.embedding[each] for each in self.windows]
        for layer_id in range(first, self.config.num_layers):
            if keep:
                self.states.append(states)
            layer = build_layer(self.tensors, layer_id, torch.float32, make_linear)
            states = [self._layer(layer_id, layer, x) for x in states]
        return states

    def _layer(self, layer_id: int, layer: object, x: Tensor) -> Tensor:
        attend = attend_packed([len(x)], self.config.sliding_windows)
        return run_layer(
            layer,  # type: ignore[arg-type]
            x,
            rotary_tables(self.frequencies, torch.arange(len(x))),
            lambda q, k, v: attend(layer_id, q, k, v),
            self.config.head_dim,
            self.config.norm_eps,
        )

    def measure(self, replaced: Mapping[str, Tensor], first: int = 0) -> Quality:
        """Compare the model with these weights; layers before `first` must be the original ones."""
        return self.judge(self.run(replaced_linear(replaced), first))

    @torch.inference_mode()
    def judge(self, states: Sequence[Tensor]) -> Quality:
        """Compare last hidden states with those of the checkpoint itself."""
        quality = Quality([], [], [])
        for window, own, original in zip(self.windows, states, self.reference, strict=True):
            nll = divergence = same = 0.0
            for start in range(0, len(window) - 1, ROWS):
                rows = slice(start, min(start + ROWS, len(window) - 1))
                q, p = (self._log_probs(each[rows]) for each in (own, original))
                targets = window[rows.start + 1 : rows.stop + 1]
                nll += float(functional.nll_loss(q, targets, reduction="sum"))
                divergence += float((p.exp() * (p - q)).sum(dtype=torch.float64))
                same += float((p.argmax(-1) == q.argmax(-1)).sum())
            count = len(window) - 1
            quality.nll.append(nll / count)
            quality.divergence.append(divergence / count)
            quality.agreement.append(same / count)
        return quality

    def _log_probs(self, x: Tensor) -> Tensor:
        logits = functional.linear(rms_norm(x, self.norm, self.config.norm_eps), self.head)
        return logits.log_softmax(-1)
