"""`minigen doctor`: what this machine can run, what it cannot, and how another one differs."""

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from minigen.doctor.compare import Agreement, Comparison, Difference, Ratio, compare
from minigen.doctor.report import Report, read_report, to_json
from minigen.errors import OptionError

_THIS = "this machine"


def run_doctor(files: list[Path], *, as_json: bool, comparing: bool) -> None:
    """Print this machine's report, or how two machines differ.

    Raises `OptionError` where the options do not go together, `FileFormatError` for a file that is
    no report.
    """
    if comparing and as_json:
        raise OptionError("--json prints one machine's report and --compare prints text: give one.")
    if files and not comparing:
        raise OptionError(f"To set {files[0]} beside this machine, write --compare {files[0]}.")
    if comparing and len(files) not in (1, 2):
        raise OptionError(
            f"--compare takes one report, to set beside this machine, or two, not {len(files)}; "
            "`minigen doctor --json > FILE` writes one."
        )
    if comparing:
        *first, last = [read_report(path) for path in files]
        left = first[0] if first else _examined()
        print_comparison(files[0].name if first else _THIS, files[-1].name, compare(left, last))
    elif as_json:
        print(to_json(_examined()))
    else:
        print_report(_examined())


def print_report(report: Report) -> None:
    """Print every finding, then what to do about those that lack."""
    console = Console(highlight=False)
    table = Table.grid("", "", Column(overflow="fold"), padding=(0, 2))
    for finding in report.findings:
        mark = Text("ok", "green") if finding.fine else Text("--", "yellow")
        table.add_row(mark, Text(finding.topic, "bold"), Text(finding.found))
    console.print(table)
    remedies = [finding for finding in report.findings if finding.remedy]
    if remedies:
        console.print()
    for finding in remedies:
        console.print(Text.assemble((finding.topic, "bold"), f": {finding.remedy}"))


def print_comparison(left: str, right: str, found: Comparison) -> None:
    """Print what differs between two machines: numerics, what may explain them, speed, the rest."""
    console = Console(highlight=False)
    console.print(Text(f"{left}  |  {right}", "underline"))
    console.print()
    console.print(Text("The same arithmetic on both", "bold"))
    for agreement in found.agreements:
        verdict = _verdict(agreement, left, right)
        console.print(Text(f"  {agreement.form}: {verdict}"), soft_wrap=True)
    parts = {"What bears on numbers": found.numerics, "What else differs": found.others}
    for title, differences in parts.items():
        console.print()
        console.print(Text(title if differences else f"{title}: nothing", "bold"))
        for line in _told(differences):
            console.print(line, soft_wrap=True)
    console.print()
    console.print(Text("Speed", "bold"))
    console.print(_speeds(left, right, found.speeds))


def _examined() -> Report:
    """Measure, with a sign of life on stderr: stdout is for the report."""
    from minigen.doctor.facts import examine

    with Console(stderr=True).status("measuring this machine"):
        return examine()


def _verdict(agreement: Agreement, left: str, right: str) -> str:
    if agreement.missing:
        sides = [{"left": left, "right": right}[side] for side in agreement.missing]
        return f"not compiled on {' and '.join(sides)}, so not computed (minigen compile)"
    if not agreement.stages:
        return "the same bits in every stage"
    first, *others = agreement.stages
    return f"other bits first in {first}" + (f", also in {', '.join(others)}" if others else "")


def _told(differences: list[Difference]) -> Iterator[Text]:
    """Each field with both values; those that count for the same reason stand together."""
    for why in dict.fromkeys(each.why for each in differences):
        for each in differences:
            if each.why == why:
                yield Text.assemble(("  " + each.key, "bold"), f"  {each.left}  |  {each.right}")
        yield Text(f"      {why}", "dim")


def _speeds(left: str, right: str, ratios: list[Ratio]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row("", Text(left, "underline"), Text(right, "underline"), "ratio")
    for each in ratios:
        numbers = (_number(each.left), _number(each.right), f"{each.ratio:.3g}")
        table.add_row(Text(each.key.removeprefix("speed.")), *numbers)
    return table


def _number(value: float) -> str:
    return f"{value / 1e9:,.1f} billion" if value >= 1e7 else f"{value:,.1f}"
