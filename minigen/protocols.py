"""The sockets: what each layer asks of the layers that are passed in to it.

Axis words, everywhere: tokens sequences blocks block_size layers q_heads kv_heads head_dim hidden
ffn vocab. Batches are packed: the new tokens of all sequences lie one after another on one axis.
"""

from collections.abc import Sequence as SequenceOf
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from minigen.sequence import SampledToken, Sequence


@runtime_checkable
class Linear(Protocol):
    """A linear layer in whatever form its weights are kept; may be several, fused.

    `parts` are the output widths of the layers that were fused, in order.
    """

    @property
    def parts(self) -> tuple[int, ...]: ...

    def __call__(
        self, x: Float[Tensor, "tokens in_features"]
    ) -> Float[Tensor, "tokens out_features"]: ...


@runtime_checkable
class Attend(Protocol):
    """Attention for one step, already bound to the step's batch and to where K and V are kept.

    Stores the new tokens' `k` and `v` for layer `layer_id`, and lets `q` look at all that its
    sequence has.
    """

    def __call__(
        self,
        layer_id: int,
        q: Float[Tensor, "tokens q_heads head_dim"],
        k: Float[Tensor, "tokens kv_heads head_dim"],
        v: Float[Tensor, "tokens kv_heads head_dim"],
    ) -> Float[Tensor, "tokens q_heads head_dim"]: ...


@runtime_checkable
class Sampler(Protocol):
    """Chooses each sequence's next token from its row of raw logits."""

    def __call__(
        self, logits: Float[Tensor, "sequences vocab"], sequences: SequenceOf[Sequence]
    ) -> list[SampledToken]: ...


@runtime_checkable
class Runner(Protocol):
    """Runs the model over the tokens of each sequence that it has not seen yet."""

    def logits(self, sequences: SequenceOf[Sequence]) -> Float[Tensor, "sequences vocab"]: ...

    def release(self, sequence: Sequence) -> None: ...
