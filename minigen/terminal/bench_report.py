"""What a load found, as a table and a few sentences on stdout."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from minigen.errors import OptionError
from minigen.server.slo import LATENCIES, Report, Spread

NAMES = {"ttft": "time to first token", "itl": "inter-token latency"}
NAMES |= {"tpot": "time per output token", "e2e": "end to end"}
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
TOO_LATE = 0.010  # seconds: from here on the load was not what was asked for


def print_report(title: str, found: Report, has_usage: bool, cpu_seconds: float) -> None:
    """Print a load's numbers; `cpu_seconds` are the load generator's own."""
    console = Console(highlight=False)
    console.print(spreads(title, {NAMES[each]: getattr(found, each) for each in LATENCIES}))
    for sentence in _sentences(found, has_usage, cpu_seconds):
        console.print(sentence, markup=False, soft_wrap=True)


def check_lengths(most: int, context: int) -> None:
    """Raise `OptionError` for a prompt and an answer of `most` tokens that exceed the context."""
    if most > context:
        raise OptionError(
            f"--input-tokens and --output-tokens make up to {most} tokens; this model's context "
            f"holds {context}."
        )


def spreads(title: str, rows: dict[str, Spread | None]) -> Table:
    """A table of latencies in milliseconds; a latency that there was none of is a dash."""
    table = Table(title=title, title_justify="left")
    table.add_column("milliseconds")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for name, spread in rows.items():
        cells = ("-" if spread is None else _amount(getattr(spread, each)) for each in COLUMNS)
        table.add_row(name, *cells)
    return table


def _amount(seconds: float) -> str:
    milliseconds = seconds * 1e3
    decimals = 0 if milliseconds >= 1000 else 1 if milliseconds >= 10 else 2
    return f"{milliseconds:,.{decimals}f}"


def _sentences(found: Report, has_usage: bool, cpu_seconds: float) -> Iterator[str]:
    yield (
        f"answered {found.num_answered} of {found.num_requests} in {found.seconds:.1f} s: "
        f"{found.request_rate:.2f} requests/s, {found.output_rate:,.1f} output tokens/s "
        f"({found.prompt_tokens:,} tokens in, {found.output_tokens:,} out)"
    )
    if found.goodput is not None:
        kept = ", ".join(f"{name} {count}" for name, count in found.met.items())
        yield f"goodput {found.goodput:.2f} requests/s met every objective; met alone: {kept}"
    for kind, count in found.errors.items():
        yield f"error: {kind}, {count} times ({found.details[kind]})"
    if not has_usage:
        yield "the server sent no usage: each event with text counts as a token"
    elif found.tokens_per_event and abs(found.tokens_per_event - 1) > 0.02:
        yield (
            f"an event brought {found.tokens_per_event:.2f} tokens on average: inter-token latency "
            "is from event to event, time per output token counts tokens"
        )
    yield (
        f"the load generator took {cpu_seconds / found.seconds:.1%} of a core, "
        f"{cpu_seconds / max(found.output_tokens, 1) * 1e6:,.0f} µs a token"
    )
    if found.lateness is not None and found.lateness.p99 > TOO_LATE:
        yield (
            f"the load generator could not keep the pace: 1 % of the requests left more than "
            f"{found.lateness.p99 * 1e3:,.0f} ms late, which their times include"
        )
