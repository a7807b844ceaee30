"""Exercise first_that_fit of chapter 00 (stretch, 15 points, about 20 minutes).

Return how many of the first requests fit into `memory` bytes together. `lengths` has the tokens
of each request, in the order of arrival. The first request that does not fit ends the count: no
request behind it may overtake it, not even a shorter one. Weights, KV cache and working memory
are those of `most_sequences`. Leave the list as it is.

Check it:     minigen check exercises/00_map/first_that_fit.py
With a hint:  minigen check exercises/00_map/first_that_fit.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen_course.lab.cost_model import config_of
    from minigen_course.figures.explore import picture
    from minigen_course.ch00_map.figures import queue

    with using(0, first_that_fit=mine):
        drawn = queue(config_of("Llama-3-8B"), 4.5, 24, [16_000, 8_000, 30_000, 12_000, 24_000, 60_000])
    picture(drawn, "Requests in the order of arrival; your function fills those that run.")

Harder: Which order of the same requests lets the most of them run at once, and which requests
would then wait for ever if new ones keep coming?
"""

# exercise: minigen_course.lab.cost_model.first_that_fit
from collections.abc import Sequence

from minigen.checkpoint.model_config import ModelConfig
from minigen_course.lab.cost_model import GB


def first_that_fit(
    config: ModelConfig, bits: float, memory: float, lengths: Sequence[int], working: float = GB
) -> int:
    """Return how many of the first requests fit into `memory` bytes together, at least 0.

    `lengths` has the tokens of each request, in the order of arrival. The first request that does
    not fit ends the count, even if a shorter one behind it would fit. Otherwise as in
    `most_sequences`.
    """
    raise NotImplementedError  # your turn
