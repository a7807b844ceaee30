"""Which requests of a queue fit into a machine's memory, in their order of arrival."""

from collections.abc import Sequence

from minigen.checkpoint.model_config import ModelConfig
from minigen_course.lab.cost_model import GB, kv_bytes_per_token, num_parameters


def first_that_fit(
    config: ModelConfig, bits: float, memory: float, lengths: Sequence[int], working: float = GB
) -> int:
    """Return how many of the first requests fit into `memory` bytes together.

    `lengths` has the tokens of each request, in the order of arrival. The first request that does
    not fit ends the count, even if a shorter one behind it would fit. Weights have `bits` bits
    each, and `working` bytes are kept for a step's working memory.
    """
    free = memory - working - num_parameters(config) * bits / 8
    count = 0
    for length in lengths:
        free -= kv_bytes_per_token(config) * length
        if free < 0:
            break
        count += 1
    return count
