"""The sockets: the interface that each layer requires from the parts that are passed in to it.

A scheduler, an allocator, a prefix cache, a sampler and an attention backend of your own go into
`LLM.load` or the command line; minigen checks each of their calls, and raises a `PartError` that
names the method if a part breaks its contract.

Axis names, everywhere: tokens sequences blocks block_size layers q_heads kv_heads head_dim hidden
ffn vocab. Batches are packed: the new tokens of all sequences follow one another on one axis.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from minigen.sampling.processors import LogitsProcessor as LogitsProcessor
from minigen.sampling.processors import TokenMatcher as TokenMatcher
from minigen.sampling.structured_outputs import StructuredOutputsParams
from minigen.sequence import DraftCounts, SampledToken, ScheduledChunk, Sequence


@runtime_checkable
class Linear(Protocol):
    """A linear layer, in whatever format it stores its weights; several may be fused into one."""

    @property
    def parts(self) -> tuple[int, ...]:
        """The output widths of the fused layers, in order; their sum is `out_features`."""

    def __call__(
        self, x: Float[Tensor, "tokens in_features"]
    ) -> Float[Tensor, "tokens out_features"]:
        """Return `x` times the transposed weights, plus the bias if there is one."""


@runtime_checkable
class Attend(Protocol):
    """Attention for one step, bound to the step's batch and to the KV cache.

    An attention backend is a function `(pool, batch, windows)` that returns one of these at each
    step: `pool` is a `KVPool`, `batch` a `Batch`, and `windows` has each layer's sliding window in
    tokens, or None.
    """

    def __call__(
        self,
        layer_id: int,
        q: Float[Tensor, "tokens q_heads head_dim"],
        k: Float[Tensor, "tokens kv_heads head_dim"],
        v: Float[Tensor, "tokens kv_heads head_dim"],
    ) -> Float[Tensor, "tokens q_heads head_dim"]:
        """Store the new tokens' `k` and `v` for layer `layer_id`, then return the attention of `q`.

        Each query attends to all tokens of its own sequence up to its position, or to the last
        `window` of them. The result has the shape and dtype of `q`.
        """


@runtime_checkable
class Sampler(Protocol):
    """Chooses the next token of every sequence in the batch."""

    def __call__(
        self, logits: Float[Tensor, "sequences vocab"], sequences: SequenceOf[Sequence]
    ) -> list[SampledToken]:
        """Return one token per row of raw logits, as each sequence's `params` ask.

        It must not append to the sequences. A sampler of your own may return token ids; the
        logprobs that a sequence's `params` ask for are then the model's, unless a `SampledToken`
        carries others.
        """


@runtime_checkable
class Proposer(Protocol):
    """Guesses the next tokens of sequences, which one step of the model then verifies.

    A wrong guess costs time, and never changes a text.
    """

    def propose(
        self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]
    ) -> SequenceOf[SequenceOf[int]]:
        """Return drafts for each sequence: tokens that may follow its `token_ids`, in order.

        At most as many as its entry of `counts`; fewer, or none, where it has no good guess.
        """

    def end(self, sequence: Sequence) -> None:
        """Take note that a sequence has ended; its `finish_reason` says how."""


@runtime_checkable
class Speculator(Protocol):
    """Has drafts proposed before a step, and takes note of those that were right."""

    @property
    def counts(self) -> DraftCounts:
        """What was drafted and accepted since the start."""

    def serves(self, sequences: Iterable[Sequence]) -> bool:
        """Return whether a step with these sequences may have drafts."""

    def draft(self, decoding: SequenceOf[Sequence]) -> None:
        """Set `Sequence.drafts` of these sequences, which are decoding."""

    def learn(
        self,
        drafted: Mapping[Sequence, SequenceOf[int]],
        progress: SequenceOf[tuple[Sequence, SampledToken]],
        num_rows: int,
        num_tokens: int,
    ) -> dict[Sequence, int]:
        """Take note of a step; return how many drafts of each sequence were right.

        The step had `num_rows` rows of logits and computed `num_tokens` tokens.
        """

    def end(self, sequence: Sequence) -> None:
        """Take note that a sequence has ended, for whatever reason."""


@runtime_checkable
class GrammarBackend(Protocol):
    """Compiles the forms that requests ask for; it is built with (tokenizer, vocab_size, end_ids).

    Requests may call it in several threads at once.
    """

    def compile(self, params: StructuredOutputsParams) -> TokenMatcher:
        """Return a matcher at the start of the form. Raises `ParamsError` if it cannot be used."""


@runtime_checkable
class BlockAllocator(Protocol):
    """Allocates blocks of the KV cache, and counts the owners of each block.

    It is built with `num_blocks`. The ids are 1 to `num_blocks`, because padding writes to block 0.
    """

    @property
    def num_free(self) -> int:
        """The number of blocks without an owner."""

    def allocate(self, count: int) -> list[int]:
        """Return `count` different free blocks, each with one owner from now on.

        Raises `OutOfBlocksError`, and allocates nothing, if fewer blocks are free.
        """

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one owner to each block, which must already have an owner."""

    def release(self, block_ids: Iterable[int]) -> list[int]:
        """Remove one owner from each block; return the blocks that are free now."""

    def num_owners(self, block_id: int) -> int:
        """Return the block's number of owners; 0 if it is free."""


@runtime_checkable
class PrefixCache(Protocol):
    """Finds computed blocks with the same prefix, so that sequences share them.

    It is built with `allocator` and `block_size`. The cache itself is one owner of each block that
    it stores, from the `insert` that stores it to the `evict` that frees it, so a block can stay
    when no sequence uses it. A user is a sequence whose block table has the block. The cache must
    share no block between sequences of different `salt`.
    """

    @property
    def num_evictable(self) -> int:
        """The number of stored blocks that no sequence uses, so that `evict` can free them."""

    def match(self, token_ids: SequenceOf[int], salt: str | None = None) -> list[int]:
        """Return the stored blocks of the longest known prefix, each with one more owner and user.

        It adds the owners with `allocator.share`, and counts the users itself.
        It must leave at least one token without a block, because a step must compute a token to
        have logits.
        """

    def insert(
        self,
        token_ids: SequenceOf[int],
        block_ids: list[int],
        first: int,
        salt: str | None = None,
    ) -> list[tuple[int, int]]:
        """Store a sequence's full, computed blocks, from index `first` of its block table on.

        `token_ids` are the tokens of all its full blocks; `block_ids` is the block table. The
        sequence becomes a user of all these blocks. If an equal block is stored already, call
        `allocator.share` on the stored block and `allocator.release` on the sequence's own, and
        return the pair (index, stored block).
        """

    def acquire(self, block_ids: SequenceOf[int]) -> None:
        """Count one more user of each block, because a sequence was forked.

        The caller has already added the owner.
        """

    def release(self, block_ids: SequenceOf[int]) -> None:
        """Count one user fewer of each block, given in the order of the block table.

        The caller then calls `allocator.release` for the sequence.
        """

    def evict(self, count: int) -> list[int]:
        """Free `count` blocks that no sequence uses, or all of them if there are fewer.

        Returns the blocks. The least recently used should go first.
        """


@runtime_checkable
class Scheduler(Protocol):
    """Decides at each step which sequences run, and how many tokens of each are computed.

    It is built with `manager` (a `BlockManager`), `max_num_seqs` and `max_num_batched_tokens`. Call
    `manager.allocate` when a sequence starts, `manager.allocate_slots` before each later step,
    `manager.mark_computed` after each step, and `manager.free` when it ends or is preempted.
    """

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence and its siblings, which fork from it once its prompt is computed.

        A scheduler of your own gets the siblings one by one, after this sequence, and may treat
        them like any other sequence.
        """

    def schedule(self) -> list[ScheduledChunk]:
        """Return what this step computes; empty if nothing can run now.

        Return at most one chunk per sequence, and at most `max_num_batched_tokens` tokens in all.
        Every token must have a slot. Put chunks of one token first, because attention computes
        those together. A scheduler of your own may return pairs (sequence, num_tokens).
        """

    def commit(
        self, chunks: SequenceOf[ScheduledChunk], tokens: SequenceOf[SampledToken]
    ) -> list[tuple[Sequence, SampledToken]]:
        """Mark the chunks as computed, and append each sampled token to its sequence.

        `tokens` has one token per sample, in the order of `samples_of(chunks)`; read that before
        `manager.mark_computed`, which changes it. Append it with
        `sequence.append`, and free the blocks of a sequence that then has a `finish_reason`.
        Returns the samples with their tokens; a scheduler of your own may return nothing.
        """

    def abort(self, sequence: Sequence) -> None:
        """Remove a sequence, waiting or running, and free its blocks."""


@runtime_checkable
class Runner(Protocol):
    """Runs the model over scheduled chunks."""

    def logits(self, chunks: SequenceOf[ScheduledChunk]) -> Float[Tensor, "rows vocab"]:
        """Return the raw logits of each chunk's rows, chunk by chunk.

        A chunk has one row per entry of `prompt_logprob_rows` (usually none), and then one row per
        sample.
        """
