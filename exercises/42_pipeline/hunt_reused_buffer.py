"""Bug hunt reused_buffer of chapter 42 (core, 10 points, about 20 minutes).

**The report.** *Inside of one machine everything is right. Between two machines, under load,
some answers continue the text of another request, and the more micro-batches there are, the
more. With one micro-batch per step it never happens, and with a pause after each send it does
not either.* TensorRT-LLM had this mistake in its pipeline's send (pull request 10488), and
Megatron-LM freed the memory of a result while it was still being sent (pull request 4047, found
in a run of Llama 3.1 405B on 16 stages).

Find the mistake in the part below. Catch it with a test that fails on this part and passes on
every correct one. Then mend the part in the same file.

Check both:  minigen check exercises/42_pipeline/hunt_reused_buffer.py
"""

# hunt: minigen_course.ch42_pipeline.hunt
from collections.abc import Callable

import numpy as np

from minigen_course.ch42_pipeline.hunt import Array, Layers, RunStage, Send


def run_stage(
    receive: Callable[[], Array], layers: Layers, send: Send, num_batches: int, size: int
) -> None:
    """Run a stage of a pipeline over `num_batches` micro-batches, and send each result on.

    `receive()` returns the next micro-batch, `size` numbers, and `layers(x, out)` writes the
    stage's result for x into out. `send(out)` begins to send and returns at once; out is read at
    any time until the function that it returns, `wait()`, has returned. While a result is sent,
    the stage computes the next micro-batch. All results have arrived when the stage returns.
    """
    out = np.zeros(size)
    waits = []
    for _ in range(num_batches):
        layers(receive(), out)
        waits.append(send(out))
    for wait in waits:
        wait()


def test_run_stage(run_stage: RunStage) -> None:
    """Assert what every right `run_stage` does, and the one above does not.

    `LateLink()` of minigen_course.ch42_pipeline.lesson is a link whose `send` reads late;
    `link.results` is what has arrived, and `link.num_open` how many results are on their way.
    """
    raise NotImplementedError  # your turn
