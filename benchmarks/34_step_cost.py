"""Decode steps, measured and predicted from their bytes and operations.

The timed call is `runner.logits` of the compiled step: it packs the batch and runs the whole model.
The prediction is that of `step_cost.py`, from the bandwidth and the peaks measured before and after
each point, with the same medians. Only a constant is fitted: the time beyond its prediction of a
step with one sequence and one token of context, the median of five.
"""

import statistics
from dataclasses import asdict
from typing import Any

from common import json_option, write_results
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from step_cost import StepCost
from step_timing import Probe, fill_cache, measure_point, measure_products

from minigen import LLM
from minigen.kernels.cpu.compile import compile_step

FORMS = ("bfloat16", "int4")
SEQUENCES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (64, 256, 1024, 4096)
MOST_TOKENS = 2**17  # 3 GB of keys and values in the default model; twice as many need over 6
BLOCK_SIZE = 16
LIMIT = 1.5

GRID = [(sequences, context) for context in CONTEXTS for sequences in SEQUENCES]
SKIPPED = [cell for cell in GRID if cell[0] * cell[1] > MOST_TOKENS]


def measure(form: str, tick: Any) -> dict[str, Any]:
    """Measure all points of one format."""
    tick(f"{form}: compiling and loading")
    compile_step(form)
    llm = LLM.load(
        weights=form,
        max_num_seqs=max(SEQUENCES),
        max_num_batched_tokens=max(SEQUENCES),
        block_size=BLOCK_SIZE,
        num_blocks=MOST_TOKENS // BLOCK_SIZE,
        enable_prefix_caching=False,
    )
    fill_cache(llm)
    probe = Probe(llm)
    tick(f"{form}: products alone")
    products = [measure_products(llm, probe, sequences) for sequences in SEQUENCES]
    points, smallest = [], [measure_point(llm, probe, 1, 1)]
    for context in CONTEXTS:
        for sequences in SEQUENCES:
            if (sequences, context) in SKIPPED:
                continue
            tick(f"{form}: {sequences} sequences, context {context:,}")
            points.append(measure_point(llm, probe, sequences, context))
        smallest.append(measure_point(llm, probe, 1, 1))
    overhead = statistics.median(point.measured - point.predicted for point in smallest)
    cost, alone = StepCost(tuple(points), overhead), StepCost(tuple(products), 0.0)
    lost = {point.sequences: point.measured - point.predicted for point in products}
    return {
        "ceilings at the end": asdict(probe.ceilings()),
        **cost.as_json(),
        "products alone": alone.as_json()["points"],
        "beyond": cost.beyond(LIMIT, lost),
    }


def shown(form: str, found: dict[str, Any]) -> Table:
    """Return each point's milliseconds and, in brackets, its ratio to the prediction."""
    table = Table(title=f"{form}: ms (times prediction), {found['overhead_ms']:.1f} ms constant")
    table.add_column("context", justify="right")
    for sequences in SEQUENCES:
        table.add_column(f"{sequences}", justify="right")
    cells = {(each["sequences"], each["context"]): each for each in found["points"]}
    for context in CONTEXTS:
        row = [cells.get((sequences, context)) for sequences in SEQUENCES]
        texts = [
            "-" if each is None else f"{each['measured_ms']:.1f} ({each['ratio']:.2f})"
            for each in row
        ]
        table.add_row(f"{context:,}", *texts)
    return table


def main() -> None:
    file = json_option()
    console = Console()
    forms = {}
    with Progress(console=console) as progress:
        task = progress.add_task("steps", total=len(FORMS) * (len(GRID) - len(SKIPPED) + 2))

        def tick(what: str) -> None:
            progress.update(task, advance=1, description=what)

        for form in FORMS:
            forms[form] = measure(form, tick)
    results = {
        "limit": LIMIT,
        "skipped, too much memory": [
            {"sequences": sequences, "context": context} for sequences, context in SKIPPED
        ],
        "forms": forms,
    }
    for form, found in forms.items():
        console.print(shown(form, found))
    if file is not None:
        write_results(file, results)


if __name__ == "__main__":
    main()
