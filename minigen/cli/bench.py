"""`minigen bench`: measures a model on this machine, or a server under load."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from minigen.cli.options import Load, loads_model
from minigen.errors import OptionError

benches = typer.Typer(invoke_without_command=True, rich_markup_mode="rich")

InputTokens = Annotated[
    str, typer.Option(help="Tokens per prompt: a number, or a range such as 32-256 to draw from.")
]
OutputTokens = Annotated[
    str, typer.Option(help="Tokens per answer: a number, or a range such as 32-256 to draw from.")
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")]
Seed = Annotated[int, typer.Option(help="Random seed; equal seeds give the same load.", min=0)]


@benches.callback()
@loads_model
def summary(
    load: Load,
    context: typer.Context,
    requests: Annotated[int, typer.Option(help="Requests that run together.")] = 16,
    input_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 64,
    output_tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = 64,
    turns: Annotated[
        int, typer.Option(help="Repetitions of the whole measurement; medians are shown.")
    ] = 3,
    json_file: JsonFile = None,
) -> None:
    """Measure a model on this machine: TTFT, prefill, decode, and many requests together.

    TTFT is the time to the first token. Prefill and decode are in tokens per second.

    minigen bench --requests 32 --max-num-seqs 32

    minigen bench serve --url http://127.0.0.1:8000 --rate 4
    """
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return
    from minigen.bench.offline import Workload, run_bench

    workload = Workload(requests, input_tokens, output_tokens, turns)
    load.check_outputs({"--json": json_file})
    run_bench(load(), workload, json_file)


@benches.command()
@loads_model
def throughput(
    load: Load,
    requests: Annotated[
        int, typer.Option(help="Number of requests; all arrive at once.", min=1)
    ] = 64,
    input_tokens: InputTokens = "64",
    output_tokens: OutputTokens = "64",
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Measure throughput without a server: requests and tokens per second of many requests.

    minigen bench throughput --requests 128 --max-num-seqs 32 --input-tokens 32-256
    """
    from minigen.bench.offline import Lengths, run_throughput
    from minigen.bench.workload import Span

    lengths = Lengths(
        Span.parse("input-tokens", input_tokens), Span.parse("output-tokens", output_tokens), seed
    )
    load.check_outputs({"--json": json_file})
    run_throughput(load(), requests, lengths, json_file)


@benches.command()
@loads_model
def latency(
    load: Load,
    turns: Annotated[
        int, typer.Option(help="Number of requests, run one after the other.", min=1)
    ] = 10,
    input_tokens: InputTokens = "64",
    output_tokens: OutputTokens = "64",
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Measure the latency of single requests without a server: TTFT and time between tokens.

    minigen bench latency --input-tokens 512
    """
    from minigen.bench.offline import Lengths, run_latency
    from minigen.bench.workload import Span

    lengths = Lengths(
        Span.parse("input-tokens", input_tokens), Span.parse("output-tokens", output_tokens), seed
    )
    load.check_outputs({"--json": json_file})
    run_latency(load(), turns, lengths, json_file)


@benches.command()
def serve(
    url: Annotated[str, typer.Option(help="The address of an OpenAI-compatible server.")] = (
        "http://127.0.0.1:8000"
    ),
    model: Annotated[
        str, typer.Option(help="The model's name; may be absent if the server has only one.")
    ] = "",
    arrivals: Annotated[
        str, typer.Option(help="poisson, constant, burst, or a trace: a file ending in .jsonl.")
    ] = "poisson",
    rate: Annotated[
        float | None, typer.Option(help="Average requests per second; 4 if absent.")
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(help="Number of requests; 200 if absent, or all of the trace.", min=1),
    ] = None,
    input_tokens: Annotated[
        str | None,
        typer.Option(help="Tokens per prompt: a number or a range such as 32-256; 64 if absent."),
    ] = None,
    output_tokens: Annotated[
        str | None,
        typer.Option(help="Tokens per answer: a number or a range such as 32-256; 64 if absent."),
    ] = None,
    dataset: Annotated[
        Path | None,
        typer.Option(help="A file of prompts: one per line, or .jsonl with prompt or messages."),
    ] = None,
    endpoint: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    slo: Annotated[
        list[str] | None,
        typer.Option(
            help="A service-level objective: ttft=500ms, itl=50ms, tpot=40ms or e2e=5s; repeatable."
        ),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option(help="Request answers of full length (an extension of OpenAI's API).")
    ] = True,
    api_key: Annotated[
        str | None, typer.Option(help="The server's API key.", envvar="MINIGEN_API_KEY")
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write all numbers to this file, request by request."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the load to this file, as a PNG.")] = None,
    seed: Seed = 0,
    max_connections: Annotated[
        int | None, typer.Option(help="Connections at once, at most; no limit if absent.", min=1)
    ] = None,
    timeout: Annotated[float, typer.Option(help="Time limit of a request, in seconds.")] = 600.0,
) -> None:
    """Measure a server under an open-loop load: latencies, throughput, and goodput.

    Open loop means that each request is sent at its arrival time, even if
    earlier requests have not been answered. Latencies are measured from that
    time. Goodput is the rate of requests that meet all objectives (--slo).

    TTFT is the time to the first token. ITL is the time from one event of a
    stream to the next, which may contain several tokens. TPOT is the time per
    token after the first, by the server's token count. E2E is the time to the
    end of the answer. A request meets an ITL objective if the p95 of its gaps
    does. Percentiles between two values are interpolated linearly.

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
    """Refuse options before a subcommand, because only the summary would use them."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            shown = name.replace("_file", "").replace("_", "-")
            command = context.invoked_subcommand
            raise OptionError(
                f"--{shown} cannot stand before {command!r}; see "
                f"`minigen bench {command} --help` for the options of that command."
            )
