"""Sampling parameters are checked when constructed: impossible values are refused by name."""

import math
from collections import UserDict
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

from minigen.errors import MinigenError, ParamsError
from minigen.sampling.params import SamplingParams

WRONG_TYPES = [True, "1", b"1", [1], {}, object(), 1j]
NOT_FINITE = [math.nan, math.inf, -math.inf, 10**400, -(10**400)]

# For each field: the allowed values that the message names, and values that are refused.
WHOLE_NUMBERS: dict[str, tuple[str, list[Any]]] = {
    "n": ("from 1 to 1024", [0, -1, 1025, None]),
    "top_k": ("from 1 to 2147483647", [0, -1, 2**31]),
    "seed": ("from -9223372036854775808 to 18446744073709551615", [2**64, -(2**63) - 1]),
    "max_tokens": ("from 1 to 2147483647", [0, -1, 2**31]),
    "min_tokens": ("from 0 to 2147483647", [-1, 2**31, None]),
    "logprobs": ("from 0 to 2147483647", [-1, 2**31]),
    "prompt_logprobs": ("from 0 to 2147483647", [-1, 2**31]),
}
NUMBERS: dict[str, tuple[str, list[Any]]] = {
    "temperature": ("from 0 to 1000000", [-0.1, 1e6 + 1]),
    "top_p": ("above 0 and at most 1", [0, 0.0, -0.5, 1.0001]),
    "min_p": ("from 0 to 1", [-1e-9, 1.0001]),
    "repetition_penalty": ("from 1e-06 to 1000000", [0, -1.0, 1e-9, 1e7]),
    "presence_penalty": ("from -1000000 to 1000000", [1e7, -1e7]),
    "frequency_penalty": ("from -1000000 to 1000000", [1e7, -1e7]),
}
CASES = [
    (name, allowed, value)
    for name, (allowed, values) in WHOLE_NUMBERS.items()
    for value in [*values, *WRONG_TYPES, *NOT_FINITE, 1.0]
] + [
    (name, allowed, value)
    for name, (allowed, values) in NUMBERS.items()
    for value in [*values, *WRONG_TYPES, *NOT_FINITE, None]
]


def refusal(**settings: Any) -> str:
    """Return the message with which these settings are refused."""
    with pytest.raises(ParamsError) as raised:
        SamplingParams(**settings)
    return str(raised.value)


@pytest.mark.parametrize(("name", "allowed", "value"), CASES, ids=range(len(CASES)))
def test_an_impossible_number_is_refused_with_the_field_and_what_it_may_be(
    name: str, allowed: str, value: Any
) -> None:
    message = refusal(**{name: value})
    assert message.startswith(name)
    assert allowed in message
    assert repr(value) in message


@pytest.mark.parametrize("value", [0, -1])
def test_other_engines_values_for_no_top_k_are_refused_with_a_hint(value: int) -> None:
    assert refusal(top_k=value).endswith("None means no limit.")


@pytest.mark.parametrize(
    "name", ["include_stop_str_in_output", "ignore_eos", "skip_special_tokens"]
)
@pytest.mark.parametrize("value", ["false", 0, 1, None, []])
def test_a_flag_must_be_true_or_false_exactly(name: str, value: Any) -> None:
    assert refusal(**{name: value}) == f"{name} must be True or False, not {value!r}."


@pytest.mark.parametrize(
    "value",
    [None, 1, b"x", bytearray(b"x"), "", [""], ["a", ""], [1], [None], ["a", b"b"], {"a": 1}],
)
def test_a_stop_that_is_not_text_or_is_empty_is_refused(value: Any) -> None:
    message = refusal(stop=value)
    assert message.startswith("stop must be text or a list of texts, and none may be empty, not ")
    assert repr(value) in message or repr((value,)) in message


@pytest.mark.parametrize(
    "value", [None, 5, "12", b"12", {1: 2}, {5}, [1.0], ["1"], [True], [-1], [2**31], [None], [[1]]]
)
def test_stop_token_ids_that_are_not_a_list_of_ids_are_refused(value: Any) -> None:
    assert refusal(stop_token_ids=value).startswith("stop_token_ids must be ")


@pytest.mark.parametrize("value", [None, 5, "5", [5], [(5, 1.0)], {5}])
def test_a_logit_bias_that_is_not_a_mapping_is_refused(value: Any) -> None:
    assert refusal(logit_bias=value).startswith(
        "logit_bias must be a mapping of token ids to numbers"
    )


@pytest.mark.parametrize("key", ["5", 5.0, True, None, -1, 2**31, (5,)])
def test_a_logit_bias_for_an_invalid_token_id_is_refused(key: Any) -> None:
    message = refusal(logit_bias={key: 1.0})
    assert message.startswith("logit_bias's token ids must be a whole number from 0 to 2147483647")


@pytest.mark.parametrize("bias", ["1", None, True, [1], *NOT_FINITE, 1e7, -1e7], ids=range(11))
def test_a_logit_bias_that_is_not_a_number_is_refused(bias: Any) -> None:
    message = refusal(logit_bias={3: 0.0, 5: bias})
    assert message.startswith("logit_bias must be a number from -1000000 to 1000000")


def test_min_tokens_above_max_tokens_are_refused() -> None:
    message = refusal(min_tokens=11, max_tokens=10)
    assert "min_tokens 11" in message
    assert "max_tokens 10" in message
    assert SamplingParams(min_tokens=10, max_tokens=10).min_tokens == 10
    assert SamplingParams(min_tokens=10_000, max_tokens=None).min_tokens == 10_000


def test_a_refusal_is_a_minigen_error_and_a_value_error() -> None:
    assert issubclass(ParamsError, MinigenError)
    assert issubclass(ParamsError, ValueError)


@pytest.mark.parametrize(
    "settings",
    [
        {"n": 1024, "top_k": 1, "top_p": 1, "min_p": 1, "temperature": 10**6},
        {"n": 1, "top_k": 2**31 - 1, "top_p": 1e-300, "min_p": 0, "temperature": 0},
        {"repetition_penalty": 1e-6, "presence_penalty": -2, "frequency_penalty": -2.0},
        {"seed": 0, "logprobs": 0, "max_tokens": 1, "min_tokens": 1},
        {"seed": -(2**63), "logprobs": 20},
        {"seed": 2**64 - 1, "max_tokens": None, "top_k": None, "logprobs": None},
        {"temperature": 5e-324},
    ],
)
def test_values_at_the_limits_are_accepted_unchanged(settings: dict[str, Any]) -> None:
    params = SamplingParams(**settings)
    assert {name: getattr(params, name) for name in settings} == settings


def test_only_a_temperature_of_zero_is_greedy() -> None:
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=0.0).greedy
    assert not SamplingParams(temperature=5e-324).greedy


def test_one_stop_and_several_are_both_given_back_as_a_tuple() -> None:
    assert SamplingParams().stops == ()
    assert SamplingParams(stop=()).stops == ()
    assert SamplingParams(stop="ab").stops == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stops == ("a", "b")


def test_no_field_can_be_changed() -> None:
    params = SamplingParams()
    for field in fields(params):
        with pytest.raises(FrozenInstanceError):
            setattr(params, field.name, getattr(params, field.name))


def test_later_changes_to_the_arguments_have_no_effect() -> None:
    stop, ids = ["a"], [1]
    bias: UserDict[Any, Any] = UserDict({2: 1.0})
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias)
    stop.append("")
    ids.append(-1)
    bias["x"] = None
    assert params == SamplingParams(stop="a", stop_token_ids=(1,), logit_bias={2: 1.0})


def test_a_changed_copy_is_checked_again() -> None:
    params = SamplingParams(temperature=0.5, stop=["a"], logit_bias={1: 2.0})
    assert replace(params, top_k=5) == SamplingParams(
        temperature=0.5, stop=["a"], logit_bias={1: 2.0}, top_k=5
    )
    with pytest.raises(ParamsError, match="top_k"):
        replace(params, top_k=0)
