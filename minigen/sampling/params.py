"""The sampling parameters of a request, with vLLM's field names, checked at construction."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from minigen.errors import ParamsError
from minigen.fields import FLAG, Values, check, option, real, require, whole
from minigen.sampling.structured_outputs import StructuredOutputsParams, structured_outputs_of

_MOST = 2**31 - 1


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _are_texts(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return _is_list(texts) and all(isinstance(each, str) and each for each in texts)


_COUNT, _PENALTY = whole(0, _MOST), real(-(10**6), 10**6)
_TOKEN_IDS = Values("a list of token ids", _is_list)
_BIASES = Values(
    "a mapping of token ids to numbers, such as {42: -1.5}",
    lambda value: isinstance(value, Mapping),
)


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of one request; raises `ParamsError` if a value is invalid.

    `temperature=0` is greedy. With `None`, `top_k` and `max_tokens` have no limit (except the
    model's context), `seed` is random, and `logprobs` and `prompt_logprobs` are not returned. Their
    number is how many of the most likely tokens to return with each token of the output or prompt.
    Presence and frequency penalties apply to tokens in the output, the repetition penalty to
    tokens in the output and the prompt.
    """

    n: int = option(1, "Answers per prompt.", whole(1, 1024), at={"generate": 1, "openai": 1})
    temperature: float = option(
        1.0,
        "Divides the logits: 0 picks the most likely token (greedy), 1 leaves the model's "
        "probabilities unchanged, larger values make the text more random.",
        real(0, 10**6),
        at={"generate": 0.0, "chat": 0.7, "openai": 1.0, "ollama": 0.8, "anthropic": 1.0},
    )
    top_k: int | None = option(
        None,
        "Sample only from this number of most likely tokens.",
        whole(1, _MOST),
        hint="None means no limit",
        at={"generate": None, "chat": None, "openai": None, "ollama": 40, "anthropic": None},
    )
    top_p: float = option(
        1.0,
        "Sample only from the most likely tokens whose probabilities add up to this.",
        real(0, 1, above=True),
        at={"generate": 1.0, "chat": 0.9, "openai": 1.0, "ollama": 0.9, "anthropic": 1.0},
    )
    min_p: float = option(
        0.0,
        "Drop tokens whose probability is below this fraction of the most likely token's.",
        real(0, 1),
        at={"generate": 0.0, "chat": 0.0, "openai": 0.0, "ollama": 0.0},
    )
    repetition_penalty: float = option(
        1.0,
        "Above 1 makes tokens of the prompt and the answer less likely.",
        real(1e-6, 10**6),
        at={"generate": 1.0, "chat": 1.05, "openai": 1.0, "ollama": 1.1},
    )
    presence_penalty: float = option(
        0.0,
        "Above 0 makes tokens of the answer less likely.",
        _PENALTY,
        at={"openai": 0.0, "ollama": 0.0},
    )
    frequency_penalty: float = option(
        0.0,
        "The same, once per occurrence in the answer.",
        _PENALTY,
        at={"openai": 0.0, "ollama": 0.0},
    )
    logit_bias: Mapping[int, float] = option(
        None,
        "By token id: a value that is added to its logit.",
        _BIASES,
        factory=dict,
        at={"openai": {}},
    )
    seed: int | None = option(
        None,
        "Random seed; equal seeds draw the same numbers, so the same text but for near ties.",
        whole(-(2**63), 2**64 - 1),
        at={"generate": None, "chat": None, "openai": None, "ollama": None},
    )
    max_tokens: int | None = option(
        256,
        "Tokens per answer, at most.",
        whole(1, _MOST),
        at={"generate": 128, "chat": 512, "demo": 80},
    )
    min_tokens: int = option(0, "Tokens per answer, at least.", _COUNT, at={"openai": 0})
    stop: str | Sequence[str] = option(
        (),
        "Stop string: generation ends where it appears; repeatable.",
        Values("text or a list of texts, and none may be empty", _are_texts),
        at={"generate": (), "openai": (), "ollama": (), "anthropic": ()},
    )
    stop_token_ids: Sequence[int] = option(
        (), "Token ids at which generation ends.", _TOKEN_IDS, at={"openai": ()}
    )
    include_stop_str_in_output: bool = option(
        False, "Keep the stop string in the text.", FLAG, at={"openai": False}
    )
    ignore_eos: bool = option(
        False, "Generate beyond the end-of-sequence token.", FLAG, at={"openai": False}
    )
    logprobs: int | None = option(
        None, "Return each token's logprob, and this number of most likely tokens.", _COUNT
    )
    prompt_logprobs: int | None = option(None, "The same for the prompt's tokens.", _COUNT)
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = option(
        None,
        "The form that each answer must have: a JSON schema, a regex, choices or a grammar.",
        Values(
            "a StructuredOutputsParams, or a mapping such as {'regex': '[0-9]+'}",
            lambda value: isinstance(value, StructuredOutputsParams | Mapping),
        ),
    )
    skip_special_tokens: bool = option(
        True, "Leave special tokens out of the text.", FLAG, at={"openai": True}
    )

    def __post_init__(self) -> None:
        check(self, ParamsError)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParamsError(
                f"min_tokens {self.min_tokens} must be at most max_tokens {self.max_tokens}."
            )
        for token_id in self.stop_token_ids:
            require("stop_token_ids", token_id, _COUNT, ParamsError)
        for token_id, bias in self.logit_bias.items():
            require("logit_bias's token ids", token_id, _COUNT, ParamsError)
            require("logit_bias", bias, _PENALTY, ParamsError)
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        if self.structured_outputs is not None:
            self._check_structured()
        object.__setattr__(self, "stop", tuple(stops))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    def _check_structured(self) -> None:
        for name in ("min_tokens", "ignore_eos"):
            if getattr(self, name):
                raise ParamsError(
                    f"{name} cannot be combined with structured_outputs, because the form decides "
                    "where an answer may end."
                )
        structured = structured_outputs_of(self.structured_outputs)
        object.__setattr__(self, "structured_outputs", structured)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, always as a tuple."""
        return tuple(self.stop)

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty changes the logits of tokens that occurred before."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def has_filters(self) -> bool:
        """Whether top-k, top-p or min-p drop tokens before the draw."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0

    @cached_property
    def plainly_greedy(self) -> bool:
        """Whether sampling is greedy on unchanged logits: no penalty, bias or banned tokens."""
        changed = self.min_tokens > 0 or self.has_penalties or len(self.logit_bias) > 0
        return self.greedy and not changed

    @property
    def greedy(self) -> bool:
        """Whether every step takes the most likely token."""
        return self.temperature == 0
