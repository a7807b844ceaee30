"""Progress bars on stderr: for a download, and for many answers at once.

This module is separate from `hub`, because rich is slow to import.
"""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichProgress

from minigen.hub import Lines, Progress
from minigen.outputs import TokenDelta


@contextmanager
def shown_progress(console: Console | None = None) -> Iterator[Progress]:
    """Show download bars while the block runs; plain lines outside a terminal or notebook.

    `console` is stderr by default.

    with shown_progress() as progress:
        hub.pull(name, progress=progress)
    """
    console = console or Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        yield Lines()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=console) as bars:
        yield _Bars(bars)


class _Bars:
    """One bar per label; work of unknown size gets a line of text instead."""

    def __init__(self, bars: RichProgress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, label: str, num_bytes: int, num_total_bytes: int | None) -> None:
        if num_total_bytes is None and num_bytes == 0:
            self._bars.console.print(label, highlight=False, markup=False)
            return
        if label not in self._tasks:
            self._tasks[label] = self._bars.add_task(label, total=num_total_bytes)
        self._bars.update(self._tasks[label], completed=num_bytes, total=num_total_bytes)


PATIENCE = 0.5  # seconds before a bar appears that was not requested: short runs need none


@contextmanager
def answering(
    num_answers: int, always: bool = False, console: Console | None = None
) -> Generator[Callable[[TokenDelta], None], None, None]:
    """Show a bar with finished answers and tokens per second while the block runs.

    It yields a function to call with each delta. The bar appears only on a terminal or in a
    notebook, and only after `PATIENCE` seconds; with `always`, everywhere and at once.
    """
    console = console or Console(stderr=True, force_terminal=True if always else None)
    if not (console.is_terminal or console.is_jupyter):
        yield lambda delta: None
        return
    bar = RichProgress(
        TextColumn("answers"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(),
        console=console,
    )
    patience = 0.0 if always else PATIENCE
    task, started = bar.add_task("answers", total=num_answers, rate=0.0), time.perf_counter()
    counts = {"tokens": 0, "answers": 0}

    def push(delta: TokenDelta) -> None:
        counts["tokens"] += 1
        counts["answers"] += delta.finish_reason is not None
        seconds = time.perf_counter() - started
        if seconds > patience:
            bar.start()  # does nothing if the bar is shown already
            bar.update(task, completed=counts["answers"], rate=counts["tokens"] / seconds)

    try:
        yield push
    finally:
        if bar.live.is_started:  # otherwise stopping would print an empty line
            bar.stop()
