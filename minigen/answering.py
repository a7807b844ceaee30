"""Progress of many answers at once: how many are whole, and tokens a second, on stderr."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from minigen.outputs import Delta

PATIENCE = 0.5  # seconds before anything is shown unasked: what is quick needs no bar


@contextmanager
def answering(
    num_answers: int, always: bool = False, console: Console | None = None
) -> Generator[Callable[[Delta], None], None, None]:
    """A bar that counts finished answers and tokens a second, for as long as the block runs.

    Shown only on a terminal or in a notebook, and only if it takes a while, unless `always`; call
    what is yielded with each delta.
    """
    console = console or Console(stderr=True, force_terminal=True if always else None)
    if not (console.is_terminal or console.is_jupyter):
        yield lambda delta: None
        return
    bar = Progress(
        TextColumn("answers"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(),
        console=console,
    )
    patience = 0.0 if always else PATIENCE
    task, begun = bar.add_task("answers", total=num_answers, rate=0.0), time.perf_counter()
    counts = {"tokens": 0, "answers": 0}

    def push(delta: Delta) -> None:
        counts["tokens"] += 1
        counts["answers"] += delta.finish_reason is not None
        seconds = time.perf_counter() - begun
        if seconds > patience:
            bar.start()  # does nothing if it runs already
            bar.update(task, completed=counts["answers"], rate=counts["tokens"] / seconds)

    try:
        yield push
    finally:
        if bar.live.is_started:  # else stopping it would print an empty line
            bar.stop()
