"""A model cut into stages that are threads of this process, and a link that reads late.

Torch computes outside of Python's lock, so two threads do use two cores. They have no KV cache and
run each text whole, which is enough to see a pipeline work. Source: Huang et al. 2019 (GPipe).
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minigen.llm import LLM
from minigen.model.attention import attend_packed
from minigen.model.transformer import run_layer
from minigen.parallel.comm import Comm, run_ranks
from minigen_course.ch42_pipeline.lesson.timeline import COMPUTE, Span, Timeline
from minigen_course.lab.cost_model import ModelShape
from minigen_course.lab.inspect_model import transformer_of

PATIENCE = 60.0  # seconds that a stage waits for its input

Texts = Sequence[Sequence[int]]
Batch = tuple[Texts, Tensor]  # the tokens of each text, and the vectors of all tokens
Stage = Callable[[Batch], Batch]


def layer_work(shape: ModelShape) -> list[float]:
    """Return the work of each layer and of the output head, in layers, for rows with logits.

    The work is that of the products: the weights that a row is multiplied with.
    """
    head = shape.vocab * shape.hidden
    layer = (shape.multiplied - head) / shape.layers
    return [1.0] * shape.layers + [head / layer]


def cut_model(llm: LLM, stages: Sequence[range]) -> list[Stage]:
    """Return a function per stage, which runs its layers; the first embeds the tokens.

    A stage that has the number behind the last layer also runs the output head, for all rows.
    """
    return [partial(_run, llm, layers) for layers in stages]


def _run(llm: LLM, layers: range, batch: Batch) -> Batch:
    model, (texts, x) = transformer_of(llm), batch
    lengths = [len(each) for each in texts]
    attend = attend_packed(lengths, llm.config.sliding_windows)
    rotation = model.rotation(torch.cat([torch.arange(each) for each in lengths]))
    if layers.start == 0:
        x = model.embed(torch.tensor([each for text in texts for each in text]))
    for layer_id in layers:
        if layer_id == len(model.layers):
            return texts, model.logits(x)
        layer, in_layer = model.layers[layer_id], partial(attend, layer_id)
        x = run_layer(layer, x, rotation, in_layer, model.head_dim, model.norm_eps)
    return texts, x


def run_stages(stages: Sequence[Stage], batches: Sequence[Texts]) -> tuple[list[Tensor], Timeline]:
    """Run micro-batches through stages that are threads, each with one core.

    Returns what comes out of the last stage, by micro-batch, and when each stage computed.
    """
    queues = [SimpleQueue[Batch]() for _ in range(len(stages) + 1)]
    for each in batches:
        queues[0].put((each, torch.empty(0)))
    spans: list[Span] = []

    def work(comm: Comm) -> None:
        torch.set_num_threads(1)  # of this thread
        with torch.inference_mode():
            for number in range(len(batches)):
                batch = queues[comm.rank].get(timeout=PATIENCE)
                start = time.perf_counter()
                result = stages[comm.rank](batch)
                spans.append(Span(comm.rank, start, time.perf_counter(), COMPUTE, number))
                queues[comm.rank + 1].put(result)

    run_ranks(len(stages), work, PATIENCE)
    origin = min(each.start for each in spans)
    shifted = [
        Span(each.rank, each.start - origin, each.end - origin, COMPUTE, each.batch)
        for each in spans
    ]
    results = [queues[-1].get()[1] for _ in batches]
    return results, Timeline(len(stages), tuple(sorted(shifted, key=lambda each: each.end)))


class LateLink:
    """A connection to the next stage, which reads what it sends as late as it may.

    At most `late` results are on their way at once: an older one is read when a newer one is sent.
    """

    def __init__(self, late: int = 99):
        self.late = late
        self._buffers: list[np.ndarray] = []
        self._arrived: dict[int, list[float]] = {}

    def send(self, out: np.ndarray) -> Callable[[], Any]:
        """Begin to send; return the function that waits until it is sent."""
        number = len(self._buffers)
        self._buffers.append(out)
        if number >= self.late:
            self._read(number - self.late)
        return lambda: self._read(number)

    @property
    def num_open(self) -> int:
        """How many results are on their way."""
        return len(self._buffers) - len(self._arrived)

    @property
    def results(self) -> list[list[float]]:
        """What has arrived, by micro-batch."""
        return [self._arrived[each] for each in sorted(self._arrived)]

    def _read(self, number: int) -> None:
        for each in range(number + 1):  # in order, as a link does
            self._arrived.setdefault(each, self._buffers[each].tolist())
