"""`minigen info`: prints a model's architecture and memory needs, from its headers alone."""

from rich.console import Console
from rich.table import Table

from minigen.checkpoint.checkpoint import Checkpoint

# Bytes per weight and per number of the KV cache; with int4, embedding and head have 8 bits.
_BYTES_OF = {"float32": (4, 4), "bfloat16": (2, 2), "int8": (34 / 32, 2), "int4": (20 / 32, 2)}
_KV_SCALE_BYTES = 4  # kv_cache_dtype="int8": per head's key and value, plus one byte per number
_MB = 1_000_000


def print_info(name: str, checkpoint: Checkpoint) -> None:
    """Print architecture, parameters and memory budget."""
    config = checkpoint.config
    facts = Table.grid(padding=(0, 2))
    windows = sorted({window for window in config.sliding_windows if window is not None})
    for label, value in (
        ("model", name),
        ("path", str(checkpoint.path)),
        ("architecture", config.family),
        ("parameters", f"{checkpoint.num_parameters:,}"),
        ("layers", str(config.num_layers)),
        ("hidden, ffn", f"{config.hidden}, {config.ffn}"),
        ("heads", f"{config.q_heads} query, {config.kv_heads} KV, of {config.head_dim}"),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("context", f"{config.max_positions:,} tokens"),
        ("sliding window", ", ".join(map(str, windows)) or "none"),
        ("embeddings", "tied" if config.tied_embeddings else "untied"),
        ("stored as", f"{checkpoint.form}, {_size(checkpoint.num_bytes)}"),
        ("chat template", "yes" if checkpoint.chat_template() is not None else "no"),
    ):
        facts.add_row(f"[bold]{label}[/bold]", value)
    console = Console(highlight=False)
    console.print(facts)
    console.print()
    console.print(_memory_table(checkpoint))


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


def _size(num_bytes: float) -> str:
    if num_bytes >= 1000 * _MB:
        return f"{num_bytes / _MB / 1000:,.1f} GB"
    if num_bytes >= _MB:
        return f"{num_bytes / _MB:,.0f} MB"
    return f"{num_bytes / 1000:,.1f} kB"
