"""`minigen bench`: a summary of a model on this machine, and a command for each question more."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from minigen.cli.options import Load, loads_model
from minigen.errors import OptionError

benches = typer.Typer(invoke_without_command=True, rich_markup_mode="rich")

InputTokens = Annotated[str, typer.Option(help="Tokens of each prompt: 64, or drawn from 32-256.")]
OutputTokens = Annotated[str, typer.Option(help="Tokens of each answer: 64, or from 32-256.")]
Seed = Annotated[int, typer.Option(help="The same seed draws the same load.", min=0)]


@benches.callback()
@loads_model
def summary(
    load: Load,
    context: typer.Context,
    requests: Annotated[int, typer.Option(help="Requests that run together.")] = 16,
    input_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 64,
    output_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
    turns: Annotated[int, typer.Option(help="Times that all is measured; medians count.")] = 3,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write every turn's numbers there.")
    ] = None,
) -> None:
    """Measure a model on this machine: first token, prefill, decode, many requests together.

    minigen bench --requests 32 --max-num-seqs 32

    minigen bench serve --url http://127.0.0.1:8000 --rate 4
    """
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return
    from minigen.bench.offline import Workload, run_bench

    asked = Workload(requests, input_tokens, output_tokens, turns)
    run_bench(load(), asked, json_file)


@benches.command()
@loads_model
def throughput(
    load: Load,
    requests: Annotated[int, typer.Option(help="Requests, all there at once.", min=1)] = 64,
    input_tokens: InputTokens = "64",
    output_tokens: OutputTokens = "64",
    seed: Seed = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the numbers there.")
    ] = None,
) -> None:
    """Many requests at once, without a server: requests and tokens a second.

    minigen bench throughput --requests 128 --max-num-seqs 32 --input-tokens 32-256
    """
    from minigen.bench.offline import Lengths, run_throughput
    from minigen.bench.workload import Span

    lengths = Lengths(
        Span.parse("input-tokens", input_tokens), Span.parse("output-tokens", output_tokens), seed
    )
    run_throughput(load(), requests, lengths, json_file)


@benches.command()
@loads_model
def latency(
    load: Load,
    turns: Annotated[int, typer.Option(help="Requests, one after the other.", min=1)] = 10,
    input_tokens: InputTokens = "64",
    output_tokens: OutputTokens = "64",
    seed: Seed = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the numbers there.")
    ] = None,
) -> None:
    """One request alone, without a server: its time to the first token, and between tokens.

    minigen bench latency --input-tokens 512
    """
    from minigen.bench.offline import Lengths, run_latency
    from minigen.bench.workload import Span

    lengths = Lengths(
        Span.parse("input-tokens", input_tokens), Span.parse("output-tokens", output_tokens), seed
    )
    run_latency(load(), turns, lengths, json_file)


@benches.command()
def serve(
    url: Annotated[str, typer.Option(help="An OpenAI-compatible server.")] = (
        "http://127.0.0.1:8000"
    ),
    model: Annotated[str, typer.Option(help="The model; the server's only one if absent.")] = "",
    arrivals: Annotated[
        str, typer.Option(help="poisson, constant, burst, or a trace: a file ending in .jsonl.")
    ] = "poisson",
    rate: Annotated[
        float | None, typer.Option(help="Requests a second on average; 4 if absent.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="Requests; 200 if absent, or all of the trace's.", min=1)
    ] = None,
    input_tokens: Annotated[
        str | None, typer.Option(help="Tokens of each prompt: 64 (if absent), or from 32-256.")
    ] = None,
    output_tokens: Annotated[
        str | None, typer.Option(help="Tokens of each answer: 64 (if absent), or from 32-256.")
    ] = None,
    dataset: Annotated[
        Path | None, typer.Option(help="Prompts, one a line; or .jsonl of prompt or messages.")
    ] = None,
    endpoint: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    slo: Annotated[
        list[str] | None,
        typer.Option(help="An objective, as ttft=500ms, itl=50ms, tpot=40ms, e2e=5s; repeatable."),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option(help="Ask for answers of full length (not in OpenAI's own API).")
    ] = True,
    api_key: Annotated[
        str | None, typer.Option(help="The server's key.", envvar="MINIGEN_API_KEY")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all numbers there, request by request.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the load there, as a PNG.")] = None,
    seed: Seed = 0,
    max_connections: Annotated[
        int | None, typer.Option(help="Connections at once; no limit if absent.", min=1)
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that a request may take.")] = 600.0,
) -> None:
    """Put an open-loop load on a server: latencies, throughput, and goodput against objectives.

    Requests leave when it is their time, whether or not those before them
    were answered, and each is timed from then on.

    ITL is the gap from each event of a stream to the next, which may bring
    several tokens; TPOT is the time for each token after the first, by the
    server's own count. The objective for itl is kept if 95 % of a request's
    gaps keep it; each other one by its one number.

    minigen bench serve --rate 4 --slo ttft=500ms --slo itl=50ms --plot load.png
    """
    for module, extra in (("aiohttp", "server"), *([("matplotlib", "notebooks")] if plot else [])):
        if find_spec(module) is None:
            raise OptionError(f"{module} is not installed: pip install 'minigen[{extra}]'.")
    from minigen.bench.client import Target
    from minigen.bench.report import Slo
    from minigen.bench.serve import RequestMix, run_serve

    run_serve(
        Target(url, model, endpoint, api_key, ignore_eos, timeout, max_connections),
        RequestMix(arrivals, rate, requests, input_tokens, output_tokens, dataset, seed),
        [Slo.parse(each) for each in slo or []],
        json_file,
        plot,
    )


def _refuse_options(context: typer.Context) -> None:
    """An option before the command would be its summary's, and so be of no use."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            shown = name.replace("_file", "").replace("_", "-")
            raise OptionError(f"--{shown} belongs behind {context.invoked_subcommand!r}.")
