"""Builds what proposes and paces drafts, from `speculative_config` and `proposer`."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minigen import hub
from minigen.checkpoint.checkpoint import Checkpoint, open_checkpoint
from minigen.config import EngineConfig, SpeculativeConfig
from minigen.errors import OptionError
from minigen.kv_cache.block_allocator import BlockAllocator, blocks_needed
from minigen.kv_cache.block_manager import BlockManager
from minigen.protocols import Proposer, Scheduler
from minigen.sampling.sampler import BatchSampler
from minigen.sockets.checks_proposer import CheckedProposer
from minigen.sockets.resolve import build_part, find_part, name_of
from minigen.speculative.draft_model import DraftModelProposer
from minigen.speculative.forced import ForcedFirst, NoProposer
from minigen.speculative.ngram import NgramProposer
from minigen.speculative.pace import FixedPace, MeasuredPace
from minigen.speculative.predicted import PredictedFirst
from minigen.speculative.speculator import Speculator
from minigen.speculative.suffix import SuffixProposer
from minigen.trace.events import Trace

if TYPE_CHECKING:
    from minigen.assembly.build import Plan

MakePlan = Callable[[Checkpoint, EngineConfig], "Plan"]


def build_speculator(
    checkpoint: Checkpoint,
    options: EngineConfig,
    scheduler: Scheduler,
    num_slots: int,
    make_plan: MakePlan,
    num_threads: int,
) -> Speculator | None:
    """Return the speculator that the options ask for. Raises `OptionError` if they cannot be met.

    Without options it serves predicted texts only; it is None where the scheduler verifies none.
    """
    config = options.speculation
    verifies = getattr(scheduler, "verifies_drafts", False)
    if config is None and not verifies:
        return None
    if not verifies:
        raise OptionError(
            f"scheduler {name_of(scheduler)} verifies no drafts: speculation needs the scheduler "
            "'continuous'."
        )
    if config is None:
        proposer: Proposer = NoProposer()
    elif options.proposer is not None:
        proposer = _own(options)
    elif config.method == "ngram":
        proposer = NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
    elif config.method == "suffix":
        proposer = SuffixProposer(config.prompt_lookup_min, config.prompt_lookup_max)
    elif config.method == "grammar":
        proposer = NoProposer()
    else:
        proposer = _draft_model(checkpoint, options, config, make_plan, num_threads)
    used = config or SpeculativeConfig()
    return Speculator(
        PredictedFirst(proposer if config is None else ForcedFirst(proposer)),
        MeasuredPace() if used.adaptive else FixedPace(),
        checkpoint.config.vocab_size,
        num_slots,
        used.num_speculative_tokens,
        options.max_num_batched_tokens - options.max_num_seqs,
        only_predicted=config is None,
    )


def describe_speculation(options: EngineConfig) -> dict[str, str]:
    """Return what proposes drafts, and how many."""
    config = options.speculation
    if config is None:
        return {}
    by = config.method if options.proposer is None else name_of(options.proposer)
    most = config.num_speculative_tokens
    many = f"up to {most} drafts, as many as pay" if config.adaptive else f"{most} drafts"
    return {"speculation": f"{by}, {many}"}


def _own(options: EngineConfig) -> Proposer:
    return CheckedProposer(build_part("proposer", find_part("proposer", options.proposer, {})))


def _draft_model(
    checkpoint: Checkpoint,
    options: EngineConfig,
    config: SpeculativeConfig,
    make_plan: MakePlan,
    num_threads: int,
) -> Proposer:
    """Return a proposer by a second model, with a KV cache of its own as large as it can need."""
    if options.device != "cpu":
        raise OptionError("A draft_model runs in one process, on device='cpu'.")
    draft = checkpoint if config.model is None else open_checkpoint(hub.resolve(config.model))
    if draft.config.vocab_size != checkpoint.config.vocab_size:
        raise OptionError(
            f"The draft model {config.model} has {draft.config.vocab_size} tokens, and the model "
            f"{checkpoint.config.vocab_size}: both must have the same tokens."
        )
    if config.num_layers is not None:
        draft = _shortened(draft, config.num_layers)
    own: dict[str, Any] = {"weights": config.weights, "kv_cache_dtype": "auto"}
    plan = make_plan(draft, replace(options, **own, speculative_config=None))
    longest = min(draft.config.max_positions, checkpoint.config.max_positions)
    num_blocks = min(
        options.max_num_seqs * blocks_needed(longest, options.block_size),
        max(
            plan.default_kv_bytes // (draft.config.num_layers * options.block_size * plan.kv_bytes),
            1,
        ),
    )
    manager = BlockManager(
        BlockAllocator(num_blocks),
        None,
        options.block_size,
        options.max_num_seqs,
        min(num_blocks, blocks_needed(longest, options.block_size)),
        Trace(),
    )
    runner, _ = plan.build(manager, num_blocks, num_threads, Trace())
    sampler = BatchSampler(plan.chooser(num_threads))
    return DraftModelProposer(runner, manager, sampler, options.max_num_batched_tokens, longest)


def _shortened(checkpoint: Checkpoint, num_layers: int) -> Checkpoint:
    """Return the checkpoint with its first layers only."""
    if num_layers > checkpoint.config.num_layers:
        raise OptionError(
            f"num_layers of speculative_config is {num_layers}, and the draft model has "
            f"{checkpoint.config.num_layers}."
        )
    windows = checkpoint.config.sliding_windows[:num_layers]
    config = replace(checkpoint.config, num_layers=num_layers, sliding_windows=windows)
    return replace(checkpoint, config=config)
