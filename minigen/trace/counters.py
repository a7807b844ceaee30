"""Counters of the engine's work, which only increase; they show how much work caching saved."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from minigen.trace.events import Event, EventKind


@dataclass
class _Progress:
    """The progress of one sequence: `reached` is the most tokens of it that were ever computed.

    `prompt_tokens` is None if the sequence was queued before the counters were subscribed.
    """

    prompt_tokens: int | None
    reached: int


@dataclass(eq=False)
class WorkCounters:
    """Totals of the tokens and blocks that the engine processed; subscribe it to a trace.

    Each token that a step computes counts in one total: in `tokens_recomputed` if it had already
    been computed before a preemption, otherwise in `tokens_prefilled` if it belongs to the prompt,
    and in `tokens_decoded` after the prompt. Tokens that need no computation are `tokens_cached`,
    found in the prefix cache (also after a preemption), and `tokens_shared`, which a fork gets from
    its parent.

    `kv_bytes` is the size in bytes of one token's keys and values in one layer, and `windows` has
    each layer's sliding window, in tokens. `kv_bytes_read` is the number of bytes that attention
    reads: each position that any token of a chunk attends to counts once per chunk and layer. The
    other totals count events; see `EventKind`.

    If a sequence was queued before the subscription, its chunks of one token count as decoded, and
    longer chunks as prefilled. Nothing is stored about sequences that have ended.
    """

    kv_bytes: int
    windows: Sequence[int | None]
    steps: int = field(default=0, init=False)
    tokens_prefilled: int = field(default=0, init=False)
    tokens_decoded: int = field(default=0, init=False)
    tokens_recomputed: int = field(default=0, init=False)
    tokens_cached: int = field(default=0, init=False)
    tokens_shared: int = field(default=0, init=False)
    preemptions: int = field(default=0, init=False)
    blocks_allocated: int = field(default=0, init=False)
    blocks_shared: int = field(default=0, init=False)
    blocks_copied: int = field(default=0, init=False)
    blocks_evicted: int = field(default=0, init=False)
    kv_bytes_read: int = field(default=0, init=False)
    _progress: dict[int | None, _Progress] = field(default_factory=dict, init=False, repr=False)

    def as_dict(self) -> dict[str, int]:
        """Return the totals by name."""
        names = [each.name for each in fields(self) if not each.init and each.name[0] != "_"]
        return {name: getattr(self, name) for name in names}

    def __call__(self, event: Event) -> None:
        counts = event.counts
        match event.kind:
            case EventKind.QUEUED:
                self._progress[event.sequence_id] = _Progress(counts["prompt_tokens"], 0)
            case EventKind.SCHEDULED:
                self._count_chunk(event.sequence_id, counts["computed"], counts["tokens"])
            case EventKind.PREFIX_HIT:
                self.tokens_cached += counts["tokens"]
            case EventKind.FORKED:
                self._count_fork(event.sequence_id, counts["parent"])
            case EventKind.PREEMPTED:
                self.preemptions += 1
                # Only for a sequence whose QUEUED and chunks were all before the subscription.
                self._progress.setdefault(event.sequence_id, _Progress(None, counts["computed"]))
            case EventKind.FINISHED | EventKind.ABORTED | EventKind.FAILED:
                self._progress.pop(event.sequence_id, None)
            case EventKind.STEP:
                self.steps += 1
            case EventKind.BLOCK_ALLOCATED:
                self.blocks_allocated += 1
            case EventKind.BLOCK_SHARED:
                self.blocks_shared += 1
            case EventKind.BLOCK_COPIED:
                self.blocks_copied += 1
            case EventKind.BLOCK_EVICTED:
                self.blocks_evicted += 1

    def _count_chunk(self, sequence_id: int | None, computed: int, tokens: int) -> None:
        progress = self._progress.setdefault(sequence_id, _Progress(None, computed))
        end = computed + tokens
        recomputed = max(min(progress.reached, end) - computed, 0)
        prompt_tokens = progress.prompt_tokens
        if prompt_tokens is None:
            prompt_tokens = end if tokens > 1 else 0
        prefilled = max(min(prompt_tokens, end) - computed - recomputed, 0)
        self.tokens_recomputed += recomputed
        self.tokens_prefilled += prefilled
        self.tokens_decoded += tokens - recomputed - prefilled
        self.kv_bytes_read += self.kv_bytes * self._positions_read(end, tokens)
        progress.reached = max(progress.reached, end)

    def _positions_read(self, context: int, tokens: int) -> int:
        """Return how many positions the last `tokens` of a context attend to, summed over layers.

        A sliding window counts the token itself, so the first of them sees `window - 1` earlier
        positions.
        """
        return sum(
            context if window is None else min(context, window - 1 + tokens)
            for window in self.windows
        )

    def _count_fork(self, child_id: int | None, parent_id: int) -> None:
        child = self._progress.setdefault(child_id, _Progress(None, 0))
        parent = self._progress.get(parent_id)
        if parent is not None:
            self.tokens_shared += parent.reached
            child.reached = max(child.reached, parent.reached)
