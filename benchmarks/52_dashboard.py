"""The cost of the live dashboard: `python benchmarks/52_dashboard.py`.

A server in this process answers eight streams, as in chapter 52, without the dashboard and while it
is drawn all the time, by turns. The result is the share of tokens per second that remains.
"""

import statistics
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
from common import json_option, write_results

from minigen.bench.report import Outcome
from minigen.bench.workload import Planned, draw_words
from minigen.server.local import serving
from minigen.server.models import warm_up
from minigen_course import load_model
from minigen_course.ch52_slo import figures
from minigen_course.figures.explore import png
from minigen_course.lab.load import put_load

STREAMS, WORDS, TOKENS, TURNS = 8, 20, 256, 7


def seconds(outcomes: Sequence[Outcome]) -> float:
    """Return the seconds from the first request to the last token."""
    return max(each.ended for each in outcomes)


def watched(url: str, load: Sequence[Planned]) -> tuple[float, int]:
    """Return the seconds of the load under the dashboard, and the number of pictures drawn."""
    outcomes: list[Outcome] = []
    num_pictures = 0

    def put(*args: Any) -> None:
        outcomes.extend(put_load(*args))

    with patch.object(figures, "put_load", put):
        for figure in figures.watch(url, figures.History(), load):
            png(figure)
            num_pictures += 1
    return seconds(outcomes), num_pictures


def main() -> None:
    """Measure, print, and write JSON if a file was given."""
    file = json_option()
    llm = load_model(weights="int4", max_num_seqs=STREAMS)
    warm_up(llm)
    server, rng = serving(llm), np.random.default_rng(0)
    load = [Planned(0, draw_words(WORDS, rng), TOKENS) for _ in range(STREAMS)]
    put_load(server.url, load)
    watched(server.url, load)
    ratios, pictures = [], []
    for _ in range(TURNS):
        alone = seconds(put_load(server.url, load))
        with_it, num_pictures = watched(server.url, load)
        ratios.append(alone / with_it)
        pictures.append(num_pictures)
        print(
            f"kept {ratios[-1]:.1%} of the tokens per second, {num_pictures} pictures", flush=True
        )
    found = {
        "throughput_kept": statistics.median(ratios),
        "ratios": ratios,
        "pictures": pictures,
    }
    print(found)
    if file is not None:
        settings = {"streams": STREAMS, "words": WORDS, "tokens": TOKENS}
        write_results(file, {"settings": settings, **found})


if __name__ == "__main__":
    main()
