"""The options and sockets of an engine, checked before any work starts."""

import json
import os
import re
import reprlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

from minigen.errors import OptionError
from minigen.fields import FLAG, Values, check, one_of, option, part, require, whole

DEFAULT_MODEL = "smollm2-135m"  # a short name that `minigen.hub` knows
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
NUMBER = r"\d{1,9}(?:\.\d{1,9})?"


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """The settings of speculative decoding; the names are vLLM's where it has them."""

    method: str = option(
        "own",
        "Where drafts come from: ngram (the sequence's own text), suffix (finished answers, too), "
        "draft_model (a second model), grammar (only what a form forces), own (your proposer).",
        one_of("ngram", "suffix", "draft_model", "grammar", "own"),
    )
    num_speculative_tokens: int = option(
        8, "Drafts of a sequence in one step, at most.", whole(1, 128)
    )
    adaptive: bool = option(
        True, "Ask for as many drafts as pay by what was measured; else always the most.", FLAG
    )
    prompt_lookup_min: int = option(2, "Tokens that must be equal before a draft.", whole(1, 64))
    prompt_lookup_max: int = option(4, "Tokens that are compared, at most.", whole(1, 64))
    model: str | None = option(
        None,
        "The draft model: a name, folder or file, with the same tokens; if absent, the model "
        "itself.",
        Values("a model's name", lambda value: isinstance(value, str)),
    )
    weights: str = option(
        "auto",
        "Format of the draft model's weights.",
        one_of("auto", "float32", "bfloat16", "int8", "int4"),
    )
    num_layers: int | None = option(
        None, "Layers of the draft model that are used; all if absent.", whole(1, 2**16)
    )

    def __post_init__(self) -> None:
        check(self, OptionError)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise OptionError(
                f"prompt_lookup_min {self.prompt_lookup_min} must be at most prompt_lookup_max "
                f"{self.prompt_lookup_max}."
            )
        cheaper = self.model is not None or self.weights != "auto" or self.num_layers is not None
        if self.method == "draft_model" and not cheaper:
            raise OptionError(
                "method draft_model needs a model, or other weights or fewer num_layers of the "
                "model itself."
            )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The options of an engine: the only place for their names, types, defaults and help texts.

    The largest numbers are far beyond any use: larger ones would make the operating system fail, or
    end the process.
    """

    weights: str = option(
        "auto",
        "Format in which weights are stored and multiplied; int4 has one scale per 32 values, and "
        "auto is int4 if the file has no more bits, else int8, or torch's bfloat16 or float32 "
        "where that is faster.",
        one_of("auto", "float32", "bfloat16", "int8", "int4"),
        panel="Model",
    )
    threads: int | None = option(
        None,
        "Threads of torch and Numba; torch's default if absent.",
        whole(1, 1024),
        panel="Model",
    )
    max_num_seqs: int = option(
        16,
        "Sequences that run at once, at most.",
        whole(1, 2**16),
        # A running sequence slows the others down only a little, while a waiting one gets no
        # tokens. 64 sequences fit into the default KV cache with about 350 tokens each; if they
        # grow longer, the scheduler preempts the newest one.
        at={"serve": 64},
    )
    max_num_batched_tokens: int = option(
        2048, "Tokens that one step computes, at most.", whole(1, 2**24)
    )
    block_size: int = option(16, "Tokens per block of the KV cache.", whole(1, 2**16))
    num_blocks: int | None = option(
        None, "Blocks of the KV cache; as many as fit into its memory if absent.", whole(1, 2**24)
    )
    kv_cache_memory: int | str | None = option(
        None,
        "Memory of the KV cache in bytes, or such as 512M; if absent, 1GiB, or on a GPU what is "
        "free.",
        Values("a number of bytes, such as 1000000, 512M or 1.5GiB", lambda value: True),
    )
    kv_cache_dtype: str = option(
        "auto",
        "Data type of keys and values: int8 takes about half the memory of bfloat16, int4 and int2 "
        "less, each at a loss; auto is the type that the runner computes in. int4, int2 and fp8 "
        "run layer by layer, and so does int8 where no compiled step can run; a block is then in "
        "full precision until it is full (not in fp8).",
        one_of("auto", "bfloat16", "int8", "int4", "int2", "fp8"),
    )
    enable_prefix_caching: bool = option(
        True, "Share the blocks of prompts that begin alike.", FLAG, panel="Prefix caching"
    )
    prefix_cache: Any = option(
        None, "The prefix cache, made by NAME(allocator, block_size).", part("radix")
    )
    scheduler: Any = option(
        "continuous",
        "The scheduler, made by NAME(manager, max_num_seqs, max_num_batched_tokens).",
        part("continuous", "static", "dynamic"),
    )
    allocator: Any = option(
        None, "The block allocator, made by NAME(num_blocks).", part("free-list")
    )
    sampler: Any = option(None, "The sampler, called with (logits, sequences).", part("batch"))
    attention_backend: Any = option(
        "auto",
        "The attention, called with (pool, batch, windows) in every step; auto is the device's "
        "own.",
        part("auto", "torch", "triton"),
    )
    logits_processor: Any = option(
        None,
        "What changes the logits of each request, made by NAME(params, prompt_ids).",
        part(),
    )
    grammar_backend: Any = option(
        "llguidance",
        "What knows the tokens that a form allows, made by NAME(tokenizer, vocab_size, end_ids).",
        part("llguidance"),
    )
    speculative_config: Any = option(
        None,
        "Speculative decoding, for example "
        '{"method": "ngram", "num_speculative_tokens": 8}; texts stay the same.',
        Values("a JSON object", lambda value: True),
        panel="Speculative decoding",
    )
    proposer: Any = option(
        None,
        "What proposes tokens to speculation, made by NAME().",
        part(),
        panel="Speculative decoding",
    )
    tensor_parallel_size: int = option(
        1,
        "Processes that hold a shard of the model each, and share threads; with device cuda each "
        "has a GPU.",
        whole(1, 64),
    )
    context_parallel_size: int = option(
        1,
        "Processes that divide each long prompt and the KV cache, with all weights in each, and "
        "share threads.",
        whole(1, 64),
    )
    pipeline_parallel_size: int = option(
        1,
        "Stages that the layers are divided into, one after another; each is a process, or as many "
        "as tensor_parallel_size.",
        whole(1, 64),
    )
    pipeline_layers: tuple[int, ...] | str | None = option(
        None,
        "Layers of each stage of a pipeline, as many numbers as stages; about equal if absent.",
        Values("whole numbers from 1 on, such as (19, 11) or 19,11", lambda value: True),
    )
    num_micro_batches: int | None = option(
        None,
        "Micro-batches that a step is cut into, at most, so that all stages of a pipeline work at "
        "once; as many as stages if absent.",
        whole(1, 2**16),
    )
    compile_kernels: str = option(
        "auto",
        "auto compiles the CPU kernels of the weights' format when a model is loaded for the first "
        "time, unless the variable MINIGEN_COMPILE_KERNELS is never; with never, torch runs layer "
        "by layer until minigen compile has been run (weights int8 and int4 are compiled in any "
        "case).",
        one_of("auto", "never"),
    )
    device: str = option(
        "cpu",
        "Where to compute; cuda does so in bfloat16, in Triton, and mps on an Apple GPU, in torch.",
        one_of("cpu", "cuda", "mps"),
    )

    def __post_init__(self) -> None:
        if isinstance(self.prefix_cache, bool) or self.prefix_cache in ("on", "off"):
            on = self.prefix_cache in (True, "on")
            raise OptionError(
                "prefix_cache takes a prefix cache of your own; to switch sharing "
                f"{'on' if on else 'off'}, set enable_prefix_caching to {on} (on the command line "
                f"--{'' if on else 'no-'}enable-prefix-caching)."
            )
        check(self, OptionError)
        self.speculation  # noqa: B018  # raises if it is wrong
        if self.kv_bytes is not None and self.num_blocks is not None:
            raise OptionError(
                "num_blocks and kv_cache_memory both set the size of the KV cache; give only one "
                "of them."
            )
        if self.prefix_cache is not None and not self.enable_prefix_caching:
            raise OptionError(
                "prefix_cache is of no use while enable_prefix_caching is False; give only one."
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise OptionError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} must be at least "
                f"max_num_seqs {self.max_num_seqs}, so that each running sequence gets its token "
                "in every step."
            )
        if self.context_parallel_size > 1:
            self._check_context_parallel()
        drafts = self.speculation is not None and self.speculation.method == "draft_model"
        if drafts and self.num_ranks > 1:
            raise OptionError("A draft_model runs in one process, on device='cpu'.")
        if self.pipeline_parallel_size > 1 and self.device != "cpu":
            raise OptionError(
                f"device={self.device!r} runs no stages: leave pipeline_parallel_size at 1, or set "
                "device to 'cpu'."
            )
        if self.tensor_parallel_size > 1 and self.device == "mps":
            raise OptionError(
                f"tensor_parallel_size {self.tensor_parallel_size} does not work with "
                "device='mps', because a Mac has one GPU: leave it at 1, or set device to 'cpu'."
            )
        if self.num_micro_batches is not None and self.pipeline_parallel_size == 1:
            raise OptionError(
                "num_micro_batches is of no use while pipeline_parallel_size is 1; leave it out."
            )
        if self.num_layers_of_stages is not None:
            self._check_layers_of_stages(self.num_layers_of_stages)
        own = ("auto", "torch") if self.device == "cpu" else ("auto", "triton")
        if self.num_ranks > 1 and self.attention_backend not in own:
            by = "tensor" if self.tensor_parallel_size > 1 else "pipeline"
            raise OptionError(
                f"{by}_parallel_size above 1 needs minigen's own attention_backend: the other "
                "processes do not have yours."
            )

    def _check_layers_of_stages(self, num_layers: tuple[int, ...]) -> None:
        num_stages = self.pipeline_parallel_size
        if num_stages == 1:
            raise OptionError(
                "pipeline_layers is of no use while pipeline_parallel_size is 1; leave it out, or "
                "set pipeline_parallel_size to the number of stages that it has layers for."
            )
        if len(num_layers) != num_stages:
            raise OptionError(
                f"pipeline_layers has {len(num_layers)} numbers of layers, but "
                f"pipeline_parallel_size is {num_stages}; give {num_stages} numbers, one per stage."
            )

    def _check_context_parallel(self) -> None:
        ranks = self.context_parallel_size
        for cut in ("tensor_parallel_size", "pipeline_parallel_size"):
            if getattr(self, cut) > 1:
                raise OptionError(
                    f"context_parallel_size has all weights in each process and {cut} a part of "
                    "them; set only one of them above 1."
                )
        if self.device != "cpu":
            raise OptionError(
                f"context_parallel_size {ranks} runs on CPUs only: leave it at 1, or set device to "
                f"'cpu' instead of {self.device!r}."
            )
        if self.attention_backend not in ("auto", "torch"):
            raise OptionError(
                "context_parallel_size above 1 has its own attention across processes: leave "
                "attention_backend at 'auto'."
            )
        if self.speculation is not None and self.speculation.method == "draft_model":
            raise OptionError(
                "context_parallel_size above 1 has no draft_model, which runs in one process: take "
                "another method of speculation, such as ngram."
            )
        if self.block_size % ranks:
            fitting = -(-self.block_size // ranks) * ranks
            raise OptionError(
                f"block_size {self.block_size} cannot be divided among context_parallel_size "
                f"{ranks} processes, which have a slice of each block: set it to a multiple of "
                f"{ranks}, such as {fitting}."
            )

    @property
    def num_ranks(self) -> int:
        """The number of processes that hold the model."""
        tensor, pipeline = self.tensor_parallel_size, self.pipeline_parallel_size
        return tensor * pipeline * self.context_parallel_size

    @property
    def kv_bytes(self) -> int | None:
        """The number of bytes of `kv_cache_memory`. Raises `OptionError` if it is none."""
        if self.kv_cache_memory is None:
            return None
        return parse_bytes("kv_cache_memory", self.kv_cache_memory)

    @property
    def num_layers_of_stages(self) -> tuple[int, ...] | None:
        """The numbers in `pipeline_layers`. Raises `OptionError` if there are others than counts.

        >>> EngineConfig(pipeline_parallel_size=2, pipeline_layers="19,11").num_layers_of_stages
        (19, 11)
        """
        return None if self.pipeline_layers is None else parse_layers(self.pipeline_layers)

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """What `speculative_config` and `proposer` ask for; raises `OptionError` if it is wrong."""
        if self.speculative_config is None and self.proposer is None:
            return None
        found = parse_speculative(self.speculative_config or {})
        if (self.proposer is None) == (found.method == "own"):
            raise OptionError(
                "speculative_config needs a method, or a proposer of your own; give one of them."
            )
        return found


def parse_speculative(value: object) -> SpeculativeConfig:
    """Return the settings in a mapping, or in the text of a JSON object.

    >>> parse_speculative('{"method": "ngram", "prompt_lookup_max": 3}').prompt_lookup_max
    3
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise OptionError(f"speculative_config is no JSON: {error}.") from None
    if not isinstance(value, Mapping):
        raise OptionError(
            'speculative_config must be a JSON object such as {"method": "ngram"}, not '
            f"{reprlib.repr(value)}."
        )
    known = {each.name for each in fields(SpeculativeConfig)}
    if unknown := sorted(str(name) for name in value.keys() - known):
        raise OptionError(
            f"speculative_config has no setting {unknown[0]!r}; it has {', '.join(sorted(known))}."
        )
    try:
        return SpeculativeConfig(**value)
    except OptionError as error:
        raise OptionError(f"speculative_config: {error}") from None


def parse_bytes(name: str, value: object) -> int:
    """Convert a number, or text such as "512M" or "1.5 GiB", to a number of bytes.

    >>> parse_bytes("kv_cache_memory", "512 MiB")
    536870912
    """
    if not isinstance(value, str):
        require(name, value, whole(1, 2**62), OptionError)
        return int(value)  # type: ignore[call-overload]  # checked a line above
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([KMG]I?)?B?\s*", value.upper())
    number = 0 if found is None else int(Fraction(found[1]) * UNITS[found[2] or ""])
    if number < 1:
        raise OptionError(
            f"{name} must be a number of bytes, such as 1000000, 512M or 1.5GiB, not {value!r}."
        )
    return number


def parse_layers(value: object) -> tuple[int, ...]:
    """Convert a sequence of numbers of layers, or text such as "19,11", to a tuple.

    >>> parse_layers("19, 11")
    (19, 11)
    """
    found = value
    if isinstance(value, str):
        parts = [each.strip() for each in value.split(",")]
        found = [int(each) if re.fullmatch(r"[0-9]{1,6}", each) else each for each in parts]
    allowed = whole(1, 2**16)
    if not isinstance(found, Sequence) or not found or not all(map(allowed.allows, found)):
        raise OptionError(
            "pipeline_layers must be whole numbers from 1 on, one per stage, such as (19, 11) or "
            f"19,11, not {reprlib.repr(value)}."
        )
    return tuple(found)


def parse_seconds(name: str, value: str) -> float:
    """Convert text such as "90", "30s", "10m" or "1h30m" to seconds.

    >>> parse_seconds("keep_alive", "10m")
    600.0
    """
    text = value.strip()
    if re.fullmatch(NUMBER, text):
        return float(text)
    if not re.fullmatch(rf"({NUMBER}(ms|s|m|h))+", text):
        raise OptionError(f"{name} must be a time, such as 30s, 10m or 1h, not {value!r}.")
    parts = re.findall(rf"({NUMBER})(ms|s|m|h)", text)
    return sum(float(number) * SECONDS[unit] for number, unit in parts)


def check_outputs(
    outputs: Mapping[str, Path | None], inputs: Mapping[str, Path | None] | None = None
) -> None:
    """Check before any work that files can be written, and that none replaces another one.

    Keys are the options as they are typed, such as "--json". Raises `OptionError` for an output
    whose folder does not exist, or that is a folder, an input, or another output.
    """
    taken = {name: path for name, path in (inputs or {}).items() if path and os.path.isfile(path)}
    for name, path in outputs.items():
        if path is None:
            continue
        if not os.path.isdir(path.absolute().parent):
            raise OptionError(f"{name} {path} cannot be written: its folder does not exist.")
        if os.path.isdir(path):
            raise OptionError(f"{name} {path} cannot be written: it is a folder.")
        for other, theirs in taken.items():
            if _are_one_file(path, theirs):
                raise OptionError(f"{name} {path} would replace the file of {other}: name another.")
        taken[name] = path


def _are_one_file(one: Path, other: Path) -> bool:
    if os.path.isfile(one) and os.path.isfile(other):
        return os.path.samefile(one, other)
    return not os.path.exists(one) and os.path.realpath(one) == os.path.realpath(other)


@contextmanager
def written(option: str, path: Path) -> Generator[Path, None, None]:
    """Yield a path to write to, which replaces the option's file when the block is complete.

    So a file that exists stays as it is until then. What is no ordinary file, such as a pipe, is
    written to directly. Raises an `OptionError` that names the option if that fails.
    """
    target = Path(os.path.realpath(path))
    direct = os.path.exists(target) and not os.path.isfile(target)
    part = target if direct else target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        try:
            yield part
            if not direct:
                os.replace(part, target)
        finally:
            if not direct:
                part.unlink(missing_ok=True)
    except OSError as error:
        raise OptionError(f"--{option} {path} cannot be written: {error.strerror}.") from error
