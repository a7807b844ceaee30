"""The sampling parameters of a request, with vLLM's field names, checked at construction."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from minigen.errors import ParamsError


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of one request; raises `ParamsError` if a value is invalid.

    `temperature=0` is greedy. With `None`, `top_k` and `max_tokens` have no limit (except the
    model's context), `seed` is random, and `logprobs` and `prompt_logprobs` are not returned. Their
    number is how many of the most likely tokens to return with each token of the output or prompt.
    Presence and frequency penalties apply to tokens in the output, the repetition penalty to
    tokens in the output and the prompt.
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
        _check_int("n", self.n, 1, 1024)
        _check_float("temperature", self.temperature, 0, 10**6)
        _check_float("top_p", self.top_p, 0, 1, open_below=True)
        _check_float("min_p", self.min_p, 0, 1)
        _check_float("repetition_penalty", self.repetition_penalty, 1e-6, 10**6)
        _check_float("presence_penalty", self.presence_penalty, -(10**6), 10**6)
        _check_float("frequency_penalty", self.frequency_penalty, -(10**6), 10**6)
        for name, least, most in (
            ("top_k", 1, 2**31 - 1),
            ("seed", -(2**63), 2**64 - 1),
            ("max_tokens", 1, 2**31 - 1),
            ("logprobs", 0, 2**31 - 1),
            ("prompt_logprobs", 0, 2**31 - 1),
        ):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), least, most)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParamsError(
                f"min_tokens {self.min_tokens} must be at most max_tokens {self.max_tokens}."
            )
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ParamsError(f"{name} must be True or False, not {getattr(self, name)!r}.")
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not _is_list(stops) or any(not isinstance(stop, str) or not stop for stop in stops):
            raise ParamsError(
                f"stop must be text or a list of texts, and none may be empty, not {stops!r}."
            )
        object.__setattr__(self, "stop", tuple(stops))
        if not _is_list(self.stop_token_ids):
            raise ParamsError(
                f"stop_token_ids must be a list of token ids, not {self.stop_token_ids!r}."
            )
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, 0, 2**31 - 1)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if not isinstance(self.logit_bias, Mapping):
            raise ParamsError(
                f"logit_bias must map token ids to numbers, such as {{42: -1.5}}, not "
                f"{self.logit_bias!r}."
            )
        for token_id, bias in self.logit_bias.items():
            _check_int("logit_bias's token ids", token_id, 0, 2**31 - 1)
            _check_float("logit_bias", bias, -(10**6), 10**6)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

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

    @cached_property
    def plainly_greedy(self) -> bool:
        """Whether sampling is greedy on unchanged logits: no penalty, bias or banned tokens."""
        changed = self.min_tokens > 0 or self.has_penalties or len(self.logit_bias) > 0
        return self.greedy and not changed

    @property
    def greedy(self) -> bool:
        """Whether every step takes the most likely token."""
        return self.temperature == 0


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _check_int(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        hint = "; None means no limit" if name == "top_k" else ""
        raise ParamsError(
            f"{name} must be a whole number from {least} to {most}, not {value!r}{hint}."
        )


def _check_float(
    name: str, value: object, least: int | float, most: int, open_below: bool = False
) -> None:
    fits = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and least <= value <= most  # False for NaN
        and not (open_below and value == least)
    )
    if not fits:
        span = f"above {least} and at most {most}" if open_below else f"from {least} to {most}"
        raise ParamsError(f"{name} must be a number {span}, not {value!r}.")
