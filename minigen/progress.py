"""A download's progress as a bar: size, speed and time left, on stderr.

Apart from `hub`, which must import fast, because rich is slow to import.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichProgress

from minigen.download import Lines, Progress


@contextmanager
def shown_progress(console: Console | None = None) -> Iterator[Progress]:
    """Bars while the block runs; plain lines where `console` (stderr) is no terminal or notebook.

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
    """A bar for each label; work of unknown size is only announced."""

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
