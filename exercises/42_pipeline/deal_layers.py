"""Exercise deal_layers of chapter 42 (core, 10 points, about 20 minutes).

Deal layers out to stages. `work[i]` is the time of layer i. Return one range of layers for each
of the `num_stages` stages: the ranges follow one another, cover all layers, and none is empty.
The slowest stage sets the pace of a pipeline, so make its work as small as possible. If several
ways are equally good, each is right. Raise ValueError if there are more stages than layers.

Check it:     minigen check exercises/42_pipeline/deal_layers.py
With a hint:  minigen check exercises/42_pipeline/deal_layers.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    from minigen_course.ch42_pipeline.lesson import layer_work
    from minigen_course.lab.cost_model import SHAPES

    for name in ("SmolLM2-135M", "Llama-3-8B", "Llama-3-70B"):
        work = layer_work(SHAPES[name])
        stages = mine(work, 4)
        shown = ", ".join(f"{sum(work[each] for each in stage):.1f}" for stage in stages)
        print(f"{name}: {[len(each) for each in stages]} with the work {shown}")

Harder: A stage must also hold its layers and their share of the KV cache. Take a list of bytes
and a limit per stage as well, and leave out stages that do not fit. When does the best way need
more stages than the number that memory alone would need?
"""

# exercise: minigen_course.ch42_pipeline.reference.deal_layers
from collections.abc import Sequence


def deal_layers(work: Sequence[float], num_stages: int) -> list[range]:
    """Return the layers of each stage, as ranges that follow one another.

    `work[i]` is the time of layer i, above 0. Each stage has at least one layer, and the stage with
    the most work has as little as possible. Raises `ValueError` if there are more stages than
    layers.
    """
    raise NotImplementedError  # your turn
