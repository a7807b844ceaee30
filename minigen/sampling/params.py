"""How one request wants its tokens chosen: vLLM's field names, checked when built."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from minigen.errors import ParamsError


@dataclass(frozen=True)
class SamplingParams:
    """The settings of one request; raises `ParamsError` for what is impossible.

    `temperature=0` is greedy. `top_k`, `seed`, `max_tokens` and `logprobs` are `None` where there
    is no limit, no seed, and no logprobs; `max_tokens=None` goes on to the end of the context.
    `logprobs` and `prompt_logprobs` say how many of the likeliest tokens are told beside each
    token of the output, and of the prompt.
    Presence and frequency penalties look at the output, the repetition penalty also at the prompt.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = 256
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _whole("n", self.n, 1, 1024)
        _real("temperature", self.temperature, 0, 10**6)
        _real("top_p", self.top_p, 0, 1, open_below=True)
        _real("min_p", self.min_p, 0, 1)
        _real("repetition_penalty", self.repetition_penalty, 1e-6, 10**6)
        _real("presence_penalty", self.presence_penalty, -(10**6), 10**6)
        _real("frequency_penalty", self.frequency_penalty, -(10**6), 10**6)
        for name, least, most in (
            ("top_k", 1, 2**31 - 1),
            ("seed", -(2**63), 2**64 - 1),
            ("max_tokens", 1, 2**31 - 1),
            ("logprobs", 0, 2**31 - 1),
            ("prompt_logprobs", 0, 2**31 - 1),
        ):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), least, most)
        _whole("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParamsError(
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}; "
                "it must not be."
            )
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ParamsError(f"{name} must be True or False, not {getattr(self, name)!r}.")
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not _is_list(stops) or any(not isinstance(stop, str) or not stop for stop in stops):
            raise ParamsError(f"stop must be text, or a list of texts, none empty, not {stops!r}.")
        object.__setattr__(self, "stop", tuple(stops))
        if not _is_list(self.stop_token_ids):
            raise ParamsError(
                f"stop_token_ids must be a list of token ids, not {self.stop_token_ids!r}."
            )
        for token_id in self.stop_token_ids:
            _whole("stop_token_ids", token_id, 0, 2**31 - 1)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if not isinstance(self.logit_bias, Mapping):
            raise ParamsError(
                f"logit_bias must map token ids to numbers, as {{42: -1.5}}, not "
                f"{self.logit_bias!r}."
            )
        for token_id, bias in self.logit_bias.items():
            _whole("logit_bias's token ids", token_id, 0, 2**31 - 1)
            _real("logit_bias", bias, -(10**6), 10**6)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, always as a tuple."""
        return tuple(self.stop)

    @property
    def has_penalties(self) -> bool:
        """Whether a token that was there before is less likely, or more."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @cached_property
    def plainly_greedy(self) -> bool:
        """Whether the likeliest token is taken as the logits are: nothing banned, nor changed."""
        changed = self.min_tokens > 0 or self.has_penalties or len(self.logit_bias) > 0
        return self.greedy and not changed

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken at every step."""
        return self.temperature == 0


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _whole(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        hint = "; None means no limit" if name == "top_k" else ""
        raise ParamsError(
            f"{name} must be a whole number from {least} to {most}, not {value!r}{hint}."
        )


def _real(
    name: str, value: object, least: int | float, most: int, open_below: bool = False
) -> None:
    fits = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and least <= value <= most  # which no NaN is
        and not (open_below and value == least)
    )
    if not fits:
        span = f"above {least} and at most {most}" if open_below else f"from {least} to {most}"
        raise ParamsError(f"{name} must be a number {span}, not {value!r}.")
