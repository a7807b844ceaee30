"""`minigen generate`: streams answers to stdout, in the order of the prompts."""

import sys
from collections.abc import Sequence
from pathlib import Path

from minigen.config import written
from minigen.llm import LLM, Prompt
from minigen.sampling.params import SamplingParams
from minigen.trace.chrome import write_chrome_trace
from minigen.trace.events import Recorder
from minigen.trace.summary import summarize, table


def print_answers(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams) -> None:
    """Run all prompts at once; stream the first unfinished answer, and hold back later ones.

    An empty line separates answers. Only generated text goes to stdout.
    """
    due = [(prompt, choice) for prompt in range(len(prompts)) for choice in range(params.n)]
    held = dict.fromkeys(due, "")
    finished: set[tuple[int, int]] = set()
    for delta in llm.stream_deltas(prompts, params):
        key = (delta.prompt, delta.choice)
        held[key] += delta.text
        if delta.finish_reason is not None:
            finished.add(key)
        while due:
            _write(held[due[0]])
            held[due[0]] = ""
            if due[0] not in finished:
                break
            due.pop(0)
            _write("\n\n" if due else "\n")


def save_trace(recorder: Recorder, path: Path) -> None:
    """Write the recorded events for Perfetto, and print one line per request on stderr."""
    with written("trace", path) as file:
        write_chrome_trace(recorder.events, file)
    print(table(summarize(recorder.events)), file=sys.stderr)
    print(f"{path}: open it at https://ui.perfetto.dev", file=sys.stderr)


def _write(text: str) -> None:
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()
