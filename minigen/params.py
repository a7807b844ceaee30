"""How one request wants its tokens chosen: vLLM's field names, checked when built."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from minigen.errors import ParamsError


@dataclass(frozen=True)
class SamplingParams:
    """The settings of one request; raises `ParamsError` for what is impossible.

    `temperature=0` is greedy. `top_k`, `seed`, `max_tokens` and `logprobs` are `None` where there
    is no limit, no seed, and no logprobs; `max_tokens=None` goes on to the end of the context.
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
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _whole("n", self.n, 1, 1024)
        _real("temperature", self.temperature, 0, 1e6)
        _real("top_p", self.top_p, 0, 1, open_below=True)
        _real("min_p", self.min_p, 0, 1)
        _real("repetition_penalty", self.repetition_penalty, 0, 1e6, open_below=True)
        _real("presence_penalty", self.presence_penalty, -1e6, 1e6)
        _real("frequency_penalty", self.frequency_penalty, -1e6, 1e6)
        for name, least, most in (
            ("top_k", 1, 2**31 - 1),
            ("seed", -(2**63), 2**64 - 1),
            ("max_tokens", 1, 2**31 - 1),
            ("logprobs", 0, 2**31 - 1),
        ):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), least, most)
        _whole("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParamsError(
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}; "
                "it must not be."
            )
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if any(not isinstance(stop, str) or not stop for stop in stops):
            raise ParamsError(f"stop must be text, or several texts, none empty, not {stops!r}.")
        object.__setattr__(self, "stop", stops)
        for token_id in self.stop_token_ids:
            _whole("stop_token_ids", token_id, 0, 2**31 - 1)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token_id, bias in self.logit_bias.items():
            _whole("logit_bias's token ids", token_id, 0, 2**31 - 1)
            _real("logit_bias", bias, -1e6, 1e6)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, always as a tuple."""
        return tuple(self.stop)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken at every step."""
        return self.temperature == 0


def _whole(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        hint = "; None means no limit" if name == "top_k" else ""
        raise ParamsError(
            f"{name} must be a whole number from {least} to {most}, not {value!r}{hint}."
        )


def _real(name: str, value: object, least: float, most: float, open_below: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not least <= value <= most:  # type: ignore[arg-type,operator]
        raise ParamsError(f"{name} must be a number from {least} to {most}, not {value!r}.")
    if open_below and value == least:
        raise ParamsError(f"{name} must be above {least}, not {value!r}.")
