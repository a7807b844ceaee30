"""An option has one home, its field: flags, signatures, schemas and pages are made from it."""

import inspect
from dataclasses import dataclass, fields
from typing import Any

import pytest
import typer
from pydantic import BaseModel, ValidationError
from typer.testing import CliRunner

from minigen import LLM, SamplingParams
from minigen.assembly import build
from minigen.cli.main import app
from minigen.cli.options import engine_flags, sampling_flags, with_options
from minigen.cli.serve import limits_of
from minigen.config import EngineConfig
from minigen.errors import OptionError, ParamsError
from minigen.fields import declare, default_at, offered_at, option, option_of, real, whole
from minigen.server.middleware.limits import Limits
from minigen.server.openai.schema import with_sampling
from tools.options import PAGE, page, table


@dataclass(frozen=True, kw_only=True)
class WithLookahead(EngineConfig):
    """The options of an engine with one more: all that a new option needs, besides its use."""

    lookahead: int = option(2, "Tokens that are guessed ahead.", whole(0, 8), at={"serve": 4})


@dataclass(frozen=True)
class WithTypicalP(SamplingParams):
    """The sampling parameters with one more: all that a new one needs, besides its use."""

    typical_p: float = option(
        1.0, "Keep the typical tokens.", real(0, 1), at={"generate": 1.0, "openai": 1.0}
    )


def test_the_page_of_options_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tools.options"


def test_load_shows_every_option_with_its_type_default_and_help() -> None:
    shown = inspect.signature(LLM.load).parameters
    assert list(shown) == ["name", "progress", *(each.name for each in fields(EngineConfig))]
    for each in fields(EngineConfig):
        own = shown[each.name]
        assert (own.default, own.annotation) == (each.default, each.type)
        assert own.kind is own.KEYWORD_ONLY
        assert f"\n{each.name}: {option_of(each).help[:40]}" in (LLM.load.__doc__ or "")


def test_a_further_engine_option_needs_no_other_edit() -> None:
    assert WithLookahead(lookahead=8).lookahead == 8
    with pytest.raises(OptionError, match=r"^lookahead must be a whole number from 0 to 8, not 9"):
        WithLookahead(lookahead=9)

    def load(name: str, **options: Any) -> None:
        """Load a model."""

    declare(load, WithLookahead)
    assert inspect.signature(load).parameters["lookahead"].default == 2
    assert "lookahead: Tokens that are guessed ahead." in (load.__doc__ or "")
    assert "| `lookahead` | `int` | `2`, at serve `4` | a whole" in table(WithLookahead)
    assert typed(engine_flags(WithLookahead, "generate"))["lookahead"] == 2
    assert typed(engine_flags(WithLookahead, "serve"))["lookahead"] == 4
    assert typed(engine_flags(WithLookahead, "serve"), "--lookahead", "3")["lookahead"] == 3


def test_a_further_sampling_parameter_needs_no_other_edit() -> None:
    with pytest.raises(ParamsError, match=r"^typical_p must be a number from 0 to 1, not 2"):
        WithTypicalP(typical_p=2)
    assert "| `typical_p` | `float` | `1.0` | a number from 0 to 1" in table(WithTypicalP)
    flags = sampling_flags(WithTypicalP, "generate")
    assert typed(flags, "--typical-p", "0.5")["typical_p"] == 0.5
    assert "typical_p" not in [each.name for each in sampling_flags(WithTypicalP, "chat")]

    @with_sampling("openai", params=WithTypicalP)
    class Request(BaseModel):
        """A request."""

    assert Request.model_validate({"typical_p": 0.5}).model_dump()["typical_p"] == 0.5
    assert Request.model_validate({}).model_dump()["typical_p"] is None
    with pytest.raises(ValidationError, match="less than or equal to 1"):
        Request.model_validate({"typical_p": 2})


def typed(flags: list[inspect.Parameter], *words: str) -> dict[str, Any]:
    """Return the values of the flags after these words of a command line."""
    found: dict[str, Any] = {}
    one = typer.Typer(pretty_exceptions_enable=False)
    one.command()(with_options(lambda made: None, flags, found.update))
    assert CliRunner().invoke(one, words).exit_code == 0
    return found


@pytest.mark.parametrize("name", ["generate", "chat", "demo", "serve", "bench"])
def test_every_command_that_loads_a_model_has_every_engine_option(name: str) -> None:
    command: Any = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    flags = {each.name: each for each in command.params}
    for each in fields(EngineConfig):
        assert flags[each.name].default == default_at(each, name)
        assert flags[each.name].help == option_of(each).text
    for each in offered_at(name, SamplingParams):
        assert flags[each.name].default == (default_at(each, name) or flags[each.name].default)


def test_the_known_names_of_a_part_are_those_that_can_be_built() -> None:
    known = {each.name: option_of(each).values.names for each in fields(EngineConfig)}
    assert known["scheduler"] == tuple(build.SCHEDULERS)
    assert known["allocator"] == tuple(build.ALLOCATORS)
    assert known["prefix_cache"] == tuple(build.PREFIX_CACHES)
    assert known["sampler"] == tuple(build.SAMPLERS)


def test_the_defaults_of_a_place_are_allowed_values() -> None:
    for config in (EngineConfig, SamplingParams):
        places = {place for each in fields(config) for place in option_of(each).at}
        for place in places:
            config(**{each.name: default_at(each, place) for each in offered_at(place, config)})


def test_the_limits_of_serve_are_those_of_the_class_as_text() -> None:
    written = {each.name: default_at(each, "serve") for each in fields(Limits)}
    assert limits_of(written) == Limits()
