"""`minigen doctor`: prints what this machine can run, and compares two machines."""

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from minigen.doctor.compare import Agreement, Comparison, Difference, Ratio, compare
from minigen.doctor.report import Report, read_report, to_json
from minigen.errors import OptionError

_THIS_MACHINE = "this machine"


def run_doctor(files: list[Path], *, as_json: bool, comparing: bool) -> None:
    """Print this machine's report, or the differences between two machines.

    With `comparing`, `files` are two reports, or one to compare with this machine. Raises
    `OptionError` for options that exclude each other and for a wrong number of files, and
    `FileFormatError` for a file that is not a report.
    """
    if comparing and as_json:
        raise OptionError(
            "--json prints one machine's report and --compare prints text; give only one of them."
        )
    if files and not comparing:
        raise OptionError(f"To compare {files[0]} with this machine, write --compare {files[0]}.")
    if comparing and len(files) not in (1, 2):
        raise OptionError(
            f"--compare takes one report, to compare it with this machine, or two, not "
            f"{len(files)}; `minigen doctor --json > FILE` writes one."
        )
    if comparing:
        *others, right = [read_report(path) for path in files]
        left = others[0] if others else _examine_with_status()
        names = [path.name for path in files]
        if len(set(names)) < len(names):
            names = list(map(str, files))
        left_name, right_name = names if others else (_THIS_MACHINE, *names)
        print_comparison(left_name, right_name, compare(left, right))
    elif as_json:
        print(to_json(_examine_with_status()))
    else:
        print_report(_examine_with_status())


def print_report(report: Report) -> None:
    """Print every finding, and then the remedies for those that are not fine."""
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


def print_comparison(left: str, right: str, comparison: Comparison) -> None:
    """Print how the machines named `left` and `right` differ.

    Results come first, then what may have changed them, other differences, and speed.
    """
    console = Console(highlight=False)
    console.print(Text(f"{left}  |  {right}", "underline"))
    console.print()
    console.print(Text("Results of the same arithmetic", "bold"))
    for agreement in comparison.agreements:
        verdict = _verdict(agreement, left, right)
        console.print(Text(f"  {agreement.form}: {verdict}"), soft_wrap=True)
    sections = {
        "Differences that can change results": comparison.numerics,
        "Other differences": comparison.others,
    }
    for title, differences in sections.items():
        console.print()
        console.print(Text(title if differences else f"{title}: none", "bold"))
        for line in _difference_lines(differences):
            console.print(line, soft_wrap=True)
    console.print()
    console.print(Text("Speed", "bold"))
    console.print(_speed_table(left, right, comparison.speeds))


def _examine_with_status() -> Report:
    """Measure this machine, with a status line on stderr, because stdout is for the report."""
    from minigen.doctor.facts import examine  # imports torch, which comparing files does not need

    with Console(stderr=True).status("measuring this machine"):
        return examine()


def _verdict(agreement: Agreement, left: str, right: str) -> str:
    """Say whether the machines named `left` and `right` compute the same bits."""
    if agreement.missing:
        sides = [{"left": left, "right": right}[side] for side in agreement.missing]
        return f"not compiled on {' and '.join(sides)}, so not compared (run `minigen compile`)"
    if not agreement.stages:
        return "the same bits in every stage"
    first, *others = agreement.stages
    also = f", also in {', '.join(others)}" if others else ""
    return f"different bits, first in {first}{also}"


def _difference_lines(differences: list[Difference]) -> Iterator[Text]:
    """Yield each field with both values, grouped by the reason why the difference matters."""
    for why in dict.fromkeys(each.why for each in differences):
        for each in differences:
            if each.why == why:
                yield Text.assemble(("  " + each.key, "bold"), f"  {each.left}  |  {each.right}")
        yield Text(f"      {why}", "dim")


def _speed_table(left: str, right: str, ratios: list[Ratio]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row("", Text(left, "underline"), Text(right, "underline"), "ratio")
    for each in ratios:
        numbers = (_number(each.left), _number(each.right), f"{each.ratio:.3g}")
        table.add_row(Text(each.key.removeprefix("speed.")), *numbers)
    return table


def _number(value: float) -> str:
    """Return a speed; weights per second are so large that they are written in billions."""
    return f"{value / 1e9:,.1f} billion" if value >= 1e7 else f"{value:,.1f}"
