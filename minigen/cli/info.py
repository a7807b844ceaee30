"""`minigen info`: prints a model's architecture and memory needs, from its headers alone.

A model on this disk is read there. From the Hugging Face hub come the small JSON files and, by
HTTP range requests, the headers of the files with weights: a few hundred kB instead of gigabytes.
"""

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from minigen import hub
from minigen.checkpoint.checkpoint import Checkpoint, open_checkpoint
from minigen.checkpoint.config_json import read_json
from minigen.checkpoint.gguf import read_gguf
from minigen.checkpoint.safetensors import header_bytes, read_header
from minigen.config import EngineConfig
from minigen.errors import FileFormatError, MinigenError
from minigen.parallel.pipeline import (
    Place,
    balanced_layers,
    check_stages,
    stage_bytes,
    stage_layers,
)
from minigen.parallel.sharding import check_ranks
from minigen.progress import shown_progress

if TYPE_CHECKING:
    from minigen.hub.huggingface import RemoteFiles

# Bytes per weight and per number of the KV cache; with int4, embedding and head have 8 bits.
_BYTES_OF = {"float32": (4, 4), "bfloat16": (2, 2), "int8": (34 / 32, 2), "int4": (20 / 32, 2)}
_KV_SCALE_BYTES = 4  # kv_cache_dtype="int8": per head's key and value, plus one byte per number
_MB = 1_000_000
_FIRST_BYTES = 64 * 1024  # of a safetensors file: most headers are shorter
_FIRST_GGUF_BYTES = 1024 * 1024  # of a GGUF file, whose header holds the vocabulary
_MOST_GGUF_BYTES = 64 * 1024 * 1024
# What the configuration and the chat template are read from; a tokenizer is checked by `LLM.load`.
_JSON_FILES = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.json", "model.safetensors.index.json"),
)
_NUM_CONNECTIONS = 8


def print_info(name: str, **cut: Any) -> None:
    """Print architecture, parameters, size, and memory budget of the model with this name.

    `cut` has the engine's options for stages and their ranks; if there are several ranks, what each
    holds is printed, too. A model on the Hugging Face hub is not downloaded; one of a short name
    is. Raises an `OptionError` for a cut that the model does not allow, and a `MinigenError` if
    there is no such model or minigen cannot run it; in the latter case the facts that its headers
    give are printed first.
    """
    options = EngineConfig(**cut)
    path = hub.find(name)
    if path is None and name in hub.SHORT_NAMES:
        with shown_progress() as progress:
            path = hub.pull(name, progress=progress)
    if path is not None:
        _print_model(name, str(path), path, None, options)
        return
    files = hub.hub_model(name).remote()
    with _headers(files) as (path, sizes):
        try:
            where = f"not downloaded; commit {files.commit}"
            _print_model(name, where, path, sizes, options)
        except MinigenError as error:  # it names the temporary path
            raise type(error)(str(error).replace(str(path), name)) from None


@contextmanager
def _headers(files: "RemoteFiles") -> Iterator[tuple[Path, Mapping[str, int]]]:
    """Yield a temporary folder, or GGUF file, with headers only, and the sizes of whole files."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        file_name = files.model.file_name
        if file_name is not None:
            path, size = Path(folder, Path(file_name).name), files.sizes[file_name]
            _write_gguf_header(files, file_name, path)
            yield path, {path.name: size}
            return
        names = [
            name
            for name in files.sizes
            if name.endswith((".safetensors", ".jinja")) or name in _JSON_FILES
        ]
        with ThreadPoolExecutor(_NUM_CONNECTIONS) as pool:
            contents = pool.map(partial(_beginning, files), names)
            for name, content in zip(names, contents, strict=True):
                Path(folder, name).write_bytes(content)
        yield Path(folder), files.sizes


def _beginning(files: "RemoteFiles", name: str) -> bytes:
    """Return a safetensors file's header, or the whole of any other file."""
    size = files.sizes[name]
    if not name.endswith(".safetensors"):
        return files.read(name, 0, size)
    content = files.read(name, 0, min(size, _FIRST_BYTES))
    try:
        length = header_bytes(content)
    except ValueError:
        return content  # the reader of the header says what is wrong
    if length > len(content):
        content += files.read(name, len(content), min(size, length))
    return content[:length]


def _write_gguf_header(files: "RemoteFiles", name: str, path: Path) -> None:
    """Write the beginning of a GGUF file: twice as much until the header can be read."""
    size = files.sizes[name]
    stop = 0
    while stop < min(size, _MOST_GGUF_BYTES):
        start, stop = stop, min(size, 2 * stop or _FIRST_GGUF_BYTES)
        with path.open("ab") as file:
            file.write(files.read(name, start, stop))
        try:
            if read_gguf(path, size).data_offset <= stop:
                return
        except FileFormatError:
            continue  # cut short, or not GGUF at all
        except MinigenError:
            return


def _print_model(
    name: str,
    where: str,
    path: Path,
    sizes: Mapping[str, int] | None,
    options: EngineConfig,
) -> None:
    named = {"model": name, "path": where}
    try:
        checkpoint = open_checkpoint(path, sizes)
        facts = _facts(checkpoint)
    except MinigenError:
        _print({**named, **_raw_facts(path), "runs": "no"})
        raise
    _print({**named, **facts, "runs": "yes"})
    console = Console(highlight=False)
    console.print()
    console.print(_memory_table(checkpoint))
    if options.num_ranks > 1:
        console.print()
        console.print(_stage_table(checkpoint, options))


def _print(facts: Mapping[str, str]) -> None:
    table = Table.grid("", Column(overflow="fold"), padding=(0, 2))
    for label, value in facts.items():
        table.add_row(f"[bold]{label}[/bold]", Text(value))
    Console(highlight=False).print(table)


def _facts(checkpoint: Checkpoint) -> dict[str, str]:
    config = checkpoint.config
    windows = sorted({window for window in config.sliding_windows if window is not None})
    return {
        "architecture": config.family,
        "parameters": f"{checkpoint.num_parameters:,}",
        "layers": str(config.num_layers),
        "hidden, ffn": f"{config.hidden}, {config.ffn}",
        "heads": f"{config.q_heads} query, {config.kv_heads} KV, of {config.head_dim}",
        "vocabulary": f"{config.vocab_size:,}",
        "context": f"{config.max_positions:,} tokens",
        "sliding window": ", ".join(map(str, windows)) or "none",
        "embeddings": "tied" if config.tied_embeddings else "untied",
        "stored as": f"{checkpoint.form}, {_size(checkpoint.num_bytes)}",
        "chat template": "yes" if checkpoint.chat_template() is not None else "no",
    }


def _raw_facts(path: Path) -> dict[str, str]:
    """Return what the files in a folder say about a model that minigen cannot run."""
    try:
        config = read_json(path / "config.json")
        files = (file for file in path.glob("*.safetensors") if "consolidated" not in file.name)
        headers = [read_header(file) for file in files]
        sizes: dict[str, int] = {}
        for each in chain.from_iterable(header.values() for header in headers):
            start, stop = each["data_offsets"]
            sizes[each["dtype"]] = sizes.get(each["dtype"], 0) + stop - start
        shapes = [each["shape"] for header in headers for each in header.values()]
        num_parameters = f"{sum(map(math.prod, shapes)):,}"
        kinds = ", ".join(sorted(sizes, key=lambda kind: -sizes[kind]))
        together = _size(sum(sizes.values()))
    except (MinigenError, OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return {}
    return {
        "architecture": str(config.get("model_type", "not named")),
        "parameters": num_parameters,
        "stored as": f"safetensors ({kinds}), {together}",
    }


def _memory_table(checkpoint: Checkpoint) -> Table:
    """Return the memory of weights and KV cache per weight format, a KV cache in int8 last."""
    config = checkpoint.config
    numbers_per_token = 2 * config.num_layers * config.kv_heads * config.head_dim
    table = Table(title="memory", title_justify="left")
    for column in ("weights=", "weights", "KV per token", "KV at full context", "together"):
        table.add_column(column, justify="left" if column == "weights=" else "right")
    embedded = config.vocab_size * config.hidden * (1 if config.tied_embeddings else 2)
    int4, in_bytes = _BYTES_OF["int4"][0], 1 + _KV_SCALE_BYTES / config.head_dim
    rows = {**_BYTES_OF, "int4, KV int8": (int4, in_bytes)}
    for form, (weight_bytes, kv_bytes) in rows.items():
        weights = checkpoint.num_parameters * weight_bytes
        if form.startswith("int4"):
            weights += embedded * (_BYTES_OF["int8"][0] - weight_bytes)
        token = numbers_per_token * kv_bytes
        context = token * config.max_positions
        sizes = (weights, token, context, weights + context)
        table.add_row(form, *(_size(size) for size in sizes))
    return table


def _stage_table(checkpoint: Checkpoint, options: EngineConfig) -> Table:
    """Return what a rank of each stage has: its layers, and bytes of the file and per token."""
    config, tensors = checkpoint.config, checkpoint.tensors
    num_stages, per_stage = options.pipeline_parallel_size, options.tensor_parallel_size
    check_stages(config, num_stages, options.num_layers_of_stages)
    check_ranks(config, tensors, options.weights, per_stage)
    table = Table(title="a rank of each stage", title_justify="left")
    table.add_column("stage")
    for column in ("ranks", "layers", "of the file", "KV per token, bfloat16"):
        table.add_column(column, justify="right")
    token = 2 * max(config.kv_heads // per_stage, 1) * config.head_dim * _BYTES_OF["bfloat16"][1]
    spans = stage_layers(config.num_layers, num_stages, options.num_layers_of_stages)
    for stage, layers in enumerate(spans):
        place = Place(stage * per_stage, options.num_ranks, num_stages)
        read = stage_bytes(tensors, config, layers, place)
        ranks = f"{place.rank}" if per_stage == 1 else f"{place.rank}-{place.of_stage.stop - 1}"
        sizes = (_size(read.own + read.repeated), _size(token * len(layers)))
        table.add_row(str(stage), ranks, f"{layers.start}-{layers.stop - 1}", *sizes)
    balanced = balanced_layers(tensors, config, num_stages)
    if balanced != tuple(map(len, spans)):
        dealt = ",".join(map(str, balanced))
        table.caption = f"about equal work in a decode: --pipeline-layers {dealt}"
    return table


def _size(num_bytes: float) -> str:
    if num_bytes >= 1000 * _MB:
        return f"{num_bytes / _MB / 1000:,.1f} GB"
    if num_bytes >= _MB:
        return f"{num_bytes / _MB:,.0f} MB"
    return f"{num_bytes / 1000:,.1f} kB"
