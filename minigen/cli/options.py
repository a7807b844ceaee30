"""The flags of the command line, made from the fields of `EngineConfig` and `SamplingParams`."""

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import Field, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import typer

from minigen.config import EngineConfig, check_outputs
from minigen.errors import OptionError
from minigen.fields import default_at, offered_at, option_of
from minigen.sampling.params import SamplingParams

if TYPE_CHECKING:
    from minigen.hub import Progress
    from minigen.llm import LLM

DEFAULT_MODEL = "smollm2-135m"  # hub.DEFAULT_MODEL, without its imports; a test compares them

Command = Callable[..., None]


@dataclass(frozen=True)
class Load:
    """Loads the model with the options as typed."""

    model: str
    options: dict[str, Any]

    def __call__(self) -> "LLM":
        return load_model(self.model, **self.options)

    def check_outputs(self, outputs: Mapping[str, Path | None]) -> None:
        """Check output files before any work, as `minigen.config.check_outputs` does.

        Raises `OptionError` also for an output that would replace the model's file.
        """
        check_outputs(outputs, {"--model": Path(self.model)})


MODEL = inspect.Parameter(
    "model",
    inspect.Parameter.KEYWORD_ONLY,
    default=DEFAULT_MODEL,
    annotation=Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="A short name, a directory, a .gguf file, or a hub id (org/repo, org/repo@main).",
            rich_help_panel="Model",
        ),
    ],
)


def loads_model(command: Command) -> Command:
    """Add the options of an engine to `command(load, ...)`; `load()` applies them."""
    return with_options(
        command,
        [MODEL, *engine_flags(EngineConfig, command.__name__)],
        lambda typed: Load(typed.pop("model"), typed),
    )


def takes_engine_options(command: Command) -> Command:
    """Add the options of an engine, except the model, to `command(options, ...)`."""
    return with_options(command, engine_flags(EngineConfig, command.__name__), lambda typed: typed)


def takes_cut(command: Command) -> Command:
    """Add how a model is cut for several ranks to `command(options, ...)`."""
    cuts = ("tensor_parallel_size", "pipeline_parallel_size", "pipeline_layers")
    flags = [flag(each, "info", "Stages") for each in fields(EngineConfig) if each.name in cuts]
    return with_options(command, flags, lambda typed: typed)


def takes_sampling_options(command: Command) -> Command:
    """Add the sampling parameters that have a default for this command to `command(params, ...)`.

    Raises `ParamsError` for an invalid value, before the command runs.
    """

    def params(typed: dict[str, Any]) -> SamplingParams:
        return SamplingParams(**{name: each for name, each in typed.items() if each is not None})

    return with_options(command, sampling_flags(SamplingParams, command.__name__), params)


def engine_flags(config: Any, place: str) -> list[inspect.Parameter]:
    """Return every field of a config as a flag of the command `place`."""
    return [flag(each, place, "Engine") for each in fields(config)]


def sampling_flags(config: Any, place: str) -> list[inspect.Parameter]:
    """Return the fields of a config that have a default at `place` as flags of that command."""
    return [flag(each, place, "Sampling") for each in offered_at(place, config)]


def flag(each: "Field[Any]", place: str, panel: str, *names: str) -> inspect.Parameter:
    """Return a field of a config as a flag, by default with the field's name."""
    own, default = option_of(each), default_at(each, place)
    if len(each.name) == 1:
        names = (f"--{each.name}", f"-{each.name}")
    about = typer.Option(
        *names,
        help=own.text,
        rich_help_panel=own.panel or panel,
        show_default=("on" if default else "off") if each.type is bool else True,
    )
    return inspect.Parameter(
        each.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None if default == () else default,
        annotation=Annotated[_typed(each.type, default), about],
    )


def _typed(kind: Any, default: Any) -> Any:
    """Return the type on the command line, where a value that may be text is text."""
    if isinstance(default, str):
        return str
    kinds = get_args(kind)
    if get_origin(kind) is Sequence or any(get_origin(each) is Sequence for each in kinds):
        return list[str] | None
    return str | None if str in kinds or kind is Any else kind


def with_options(
    command: Command,
    shared: list[inspect.Parameter],
    made: Callable[[dict[str, Any]], Any],
) -> Command:
    """Return `command` with further options; its first argument is `made` of their values."""
    _, *own = inspect.signature(command).parameters.values()

    @functools.wraps(command)
    def wrapped(*given: Any, **arguments: Any) -> None:
        typed = {each.name: arguments.pop(each.name) for each in shared}
        command(made(typed), *given, **arguments)

    wrapped.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    wrapped.__annotations__ = {each.name: each.annotation for each in [*own, *shared]}
    return wrapped


def with_schema(params: SamplingParams, schema: str | None) -> SamplingParams:
    """Return the parameters with a JSON schema, given as text or as the name of a file.

    Raises `OptionError` for a file that cannot be read, `ParamsError` for a schema of no use.
    """
    if schema is None:
        return params
    if not schema.lstrip().startswith("{"):
        try:
            schema = Path(schema).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise OptionError(
                f"--json-schema {schema[:200]!r} is neither a schema, which starts with {{, nor a "
                f"file that can be read: {error}."
            ) from None
    return replace(params, structured_outputs={"json": schema})


def refuse_idle_ranks(options: Mapping[str, Any]) -> None:
    """Raise an `OptionError` if `torchrun` started several ranks for a model in one process."""
    started = int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    if started > 1 and EngineConfig(**options).num_ranks == 1:
        raise OptionError(
            f"torchrun started {started} ranks, and each would load the whole model and answer by "
            f"itself: set tensor_parallel_size or another parallel size to {started}, or start "
            "minigen without torchrun."
        )


def load_model(model: str, **options: Any) -> "LLM":
    """Call `LLM.load` with a progress bar, which is imported when there is progress to show."""
    refuse_idle_ranks(options)
    from minigen.llm import LLM

    with ExitStack() as shown:

        @functools.cache
        def bars() -> "Progress":
            from minigen.progress import shown_progress

            return shown.enter_context(shown_progress())

        def progress(label: str, num_bytes: int, num_total_bytes: int | None) -> None:
            bars()(label, num_bytes, num_total_bytes)

        return LLM.load(model, progress=progress, **options)
