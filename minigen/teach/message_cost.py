"""What the messages between ranks cost, and the speed-up that they leave.

Source: Patarasuk and Yuan 2009 for the ring; Shoeybi et al. 2019 for two all-reduces a layer.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from minigen.teach.budget import ModelShape
from minigen.teach.roofline import Machine, Step, decode_step

BYTES_A_NUMBER = 2  # activations travel in bfloat16


@dataclass(frozen=True)
class Link:
    """A connection between ranks: seconds that any message takes, bytes a second on top."""

    name: str
    latency: float
    bandwidth: float

    def all_reduce_seconds(self, num_bytes: float, num_ranks: int) -> float:
        """The faster of a ring, which moves the fewest bytes, and a tree, which takes few turns.

        A ring takes 2 (n - 1) turns with an n-th of the bytes in each, a tree 2 log2 n with all.
        """
        if num_ranks == 1:
            return 0.0
        ring_turns, tree_turns = 2 * (num_ranks - 1), 2 * math.ceil(math.log2(num_ranks))
        ring = ring_turns * (self.latency + num_bytes / num_ranks / self.bandwidth)
        return min(ring, tree_turns * (self.latency + num_bytes / self.bandwidth))


LINKS: dict[
    str, Link
] = {  # orders of magnitude: bytes one way as data sheets say, and a usual turn
    each.name: each
    for each in (
        Link("NVLink 4", 2e-6, 450e9),
        Link("PCIe 5 x16", 5e-6, 63e9),
        Link("Ethernet 25 Gbit/s", 30e-6, 3.1e9),
    )
}


def fit_link(name: str, seconds_by_bytes: Mapping[int, float], num_ranks: int) -> Link:
    """The link that explains measured all-reduces best, small ones and large ones alike.

    As a ring: the time is 2 (n - 1) turns, each with a latency and an n-th of the bytes.
    """
    sizes = np.array(list(seconds_by_bytes), dtype=float)
    seconds = np.array(list(seconds_by_bytes.values()))
    turns = 2 * (num_ranks - 1)
    terms = np.stack([np.full(len(sizes), turns), turns * sizes / num_ranks], axis=1)
    (latency, per_byte), *_ = np.linalg.lstsq(
        terms / seconds[:, None], np.ones(len(sizes)), rcond=None
    )
    return Link(name, float(latency), float(1 / per_byte))


def split_step_seconds(
    shape: ModelShape, machine: Machine, link: Link, num_ranks: int, batch: int, context: int
) -> tuple[float, float]:
    """Seconds of a decode step in its layers' work, and in its messages, on so many ranks.

    Each rank reads and computes an n-th. The messages are two all-reduces a layer and one for the
    embedding; the gather of the logits is left out.
    """
    whole = decode_step(shape, batch=batch, context=context, weight_bits=16)
    share = Step(
        whole.weight_bytes / num_ranks, whole.kv_bytes / num_ranks, whole.flops / num_ranks
    )
    message = link.all_reduce_seconds(batch * shape.hidden * BYTES_A_NUMBER, num_ranks)
    return share.seconds(machine), (2 * shape.layers + 1) * message
