"""The sockets: what each layer asks of the layers that are passed in to it.

Axis words, everywhere: tokens sequences blocks block_size layers q_heads kv_heads head_dim hidden
ffn vocab. Batches are packed: the new tokens of all sequences lie one after another on one axis.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from minigen.sequence import SampledToken, ScheduledChunk, Sequence


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
class BlockAllocator(Protocol):
    """Hands out blocks of KV memory, and counts the owners of each."""

    @property
    def num_free(self) -> int: ...

    def allocate(self, count: int) -> list[int]: ...

    def share(self, block_ids: Iterable[int]) -> None: ...

    def release(self, block_ids: Iterable[int]) -> list[int]: ...

    def num_owners(self, block_id: int) -> int: ...


@runtime_checkable
class PrefixCache(Protocol):
    """Finds computed blocks of equal beginnings, and keeps those that nobody uses for a while."""

    @property
    def num_evictable(self) -> int: ...

    def match(self, token_ids: SequenceOf[int], salt: str | None = None) -> list[int]: ...

    def insert(
        self,
        token_ids: SequenceOf[int],
        block_ids: list[int],
        first: int,
        salt: str | None = None,
    ) -> list[tuple[int, int]]: ...

    def acquire(self, block_ids: SequenceOf[int]) -> None: ...

    def release(self, block_ids: SequenceOf[int]) -> None: ...

    def evict(self, count: int) -> list[int]: ...


@runtime_checkable
class Scheduler(Protocol):
    """Decides at every step which sequences run, and takes in what came of it."""

    def add(self, sequence: Sequence) -> None: ...

    def schedule(self) -> list[ScheduledChunk]: ...

    def commit(
        self, chunks: SequenceOf[ScheduledChunk], tokens: SequenceOf[SampledToken]
    ) -> list[tuple[Sequence, SampledToken]]: ...

    def abort(self, sequence: Sequence) -> None: ...


@runtime_checkable
class Runner(Protocol):
    """Runs the model over chunks; the logits are of every chunk's `prompt_logprob_rows`, which few requests
    have, and of its `samples`, in order."""

    def logits(self, chunks: SequenceOf[ScheduledChunk]) -> Float[Tensor, "rows vocab"]: ...
