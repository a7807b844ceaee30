"""`minigen perplexity`: how well a model predicts a text, alone or beside a reference."""

import math
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minigen.cli.options import DEFAULT_MODEL, Command, flag, load_model, with_options
from minigen.config import EngineConfig, check_outputs, written
from minigen.errors import OptionError, TokenizerError

if TYPE_CHECKING:
    from minigen.bench.perplexity import Comparison, EngineRows, Result
    from minigen.llm import LLM

PYDOC = "pydoc"  # the name of the text that every Python brings with it
CONTEXT = 512
MOST_STEP = 512  # tokens in one step
BLOCK_SIZE = 16  # of the reference's KV cache
FEW_WINDOWS = 10  # a bootstrap over fewer gives intervals that are too narrow
# The engine's options that change what is measured; the others would have no effect.
_ENGINE = (
    *("weights", "threads", "block_size", "kv_cache_dtype", "attention_backend"),
    *("tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size"),
    *("pipeline_layers", "device"),
)
_OF_REFERENCE = ("threads", "device")


def takes_measured_options(command: Command) -> Command:
    """Add the options of an engine that change what is measured to `command(options, ...)`."""
    flags = [flag(each, "perplexity", "Engine") for each in fields(EngineConfig)]
    return with_options(
        command, [each for each in flags if each.name in _ENGINE], lambda typed: typed
    )


@takes_measured_options
def perplexity(
    options: dict[str, Any],
    text: Annotated[
        str,
        typer.Option(
            help="The text: a UTF-8 file, - for stdin, or pydoc for Python's own help texts."
        ),
    ],
    model: Annotated[
        str, typer.Argument(help="The model: a short name, a directory, a .gguf file or a hub id.")
    ] = DEFAULT_MODEL,
    reference: Annotated[
        str | None,
        typer.Option(
            help="Compare with this model, which must have the same vocabulary; it may be the same "
            "model with other weights."
        ),
    ] = None,
    reference_weights: Annotated[
        str | None,
        typer.Option(help="Weights of the reference; float32 if absent (on a GPU, bfloat16)."),
    ] = None,
    context: Annotated[
        int, typer.Option(help="Tokens of a window, with BOS.", min=2, max=2**24)
    ] = CONTEXT,
    stride: Annotated[
        int | None,
        typer.Option(help="Tokens scored per window; half of the context if absent.", min=1),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Use only this many tokens of the text.", min=2)
    ] = None,
    bos: Annotated[
        bool | None,
        typer.Option(
            "--bos/--no-bos",
            help="Start each window with BOS; as the model's tokenizer does if absent.",
            show_default=False,
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the numbers to this file.")
    ] = None,
) -> None:
    """Measure how well a model predicts a text: its perplexity; lower is better.

    Perplexity is the number of tokens among which the model hesitates on
    average: exp of the mean negative log-likelihood of each token, given those
    before it. Compare perplexities only if text, vocabulary, context, stride
    and BOS are the same.

    The text is cut into windows of --context tokens. Each starts --stride
    tokens after the one before, and its last --stride tokens are scored, so
    every token is scored once. A smaller stride gives tokens more context, and
    takes longer.

    With --reference, a second model reads the same windows. The
    Kullback-Leibler divergence shows small losses, such as those of
    quantisation, that perplexity hides: it is 0 only if all probabilities are
    equal. Intervals are of 95 %, by a bootstrap over the windows.

    Take a text that no calibration has seen, of 20,000 tokens or more. pydoc
    (700 kB of English about Python) is on every machine; papers use the test
    file of WikiText-2, and a book of Project Gutenberg will do.

    minigen perplexity smollm2-135m --text pydoc --max-tokens 20000

    minigen perplexity --weights int8 --reference smollm2-135m --text a.txt
    """
    if reference is None and reference_weights is not None:
        raise OptionError("--reference-weights needs --reference, which names the model.")
    check_outputs(
        {"--json": json_file},
        {
            "--text": Path(text),
            "MODEL": Path(model),
            "--reference": Path(reference) if reference else None,
        },
    )
    words = read_text(text)
    cut = Cut(context, stride or max(context // 2, 1), max_tokens, bos)
    with ExitStack() as stack:
        llm = load_model(model, **{**options, **_sizes(context, options["block_size"])})
        stack.callback(llm.close)
        other = None
        if reference is not None:
            on_cpu = options["device"] == "cpu"
            other = load_model(
                reference,
                weights=reference_weights or ("float32" if on_cpu else "auto"),
                **{name: options[name] for name in _OF_REFERENCE},
                **_sizes(context, BLOCK_SIZE),
            )
            stack.callback(other.close)
        _measure(Measured(model, reference, text, llm, other), words, cut, json_file)


@dataclass(frozen=True)
class Cut:
    """How the text is cut into windows; `bos` is None for what the tokenizer does."""

    context: int
    stride: int
    max_tokens: int | None
    bos: bool | None


@dataclass(frozen=True)
class Measured:
    """The models and the text, with the names that the user gave them."""

    model: str
    reference: str | None
    text: str
    llm: "LLM"
    other: "LLM | None"


def read_text(name: str) -> str:
    """Return the text of a file, of stdin (`-`) or of Python's help (`pydoc`).

    Raises `OptionError` if it cannot be read, is not UTF-8, or is empty.
    """
    if name == PYDOC:
        from pydoc_data.topics import topics

        return "\n\n".join(topics[each] for each in sorted(topics))
    try:
        content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        text = content.decode("utf-8")
    except OSError as error:
        raise OptionError(
            f"--text {name} cannot be read: {error.strerror}; give a file, - or {PYDOC}."
        ) from None
    except UnicodeDecodeError as error:
        raise OptionError(
            f"--text {name} is not valid UTF-8: byte {error.start} is an {error.reason}."
        ) from None
    if not text.strip():
        raise OptionError(f"--text {name} is empty: give a text of at least one window.")
    return text


def _sizes(context: int, size: int) -> dict[str, Any]:
    """Return options for an engine with blocks of `size` tokens that takes one window at a time."""
    return {
        "max_num_seqs": 1,
        "max_num_batched_tokens": min(context, MOST_STEP),
        "num_blocks": -(-context // size),
        "enable_prefix_caching": False,
    }


def _measure(measured: Measured, text: str, cut: Cut, json_file: Path | None) -> None:
    from minigen.bench.perplexity import EngineRows, score, summarize_scores, windows_of

    llm, other = measured.llm, measured.other
    for each in (llm, other):
        if each is not None and cut.context > each.config.max_positions:
            raise OptionError(
                f"--context {cut.context} is more than the {each.config.max_positions} tokens of "
                "the model's context: take a smaller one."
            )
    token_ids = llm.tokenizer.encode(text, add_special_tokens=False)
    if other is not None:
        check_same_vocabulary(llm, other, text, token_ids)
    token_ids = token_ids[: cut.max_tokens]
    bos_id = bos_token_of(llm, cut.bos)
    windows = windows_of(len(token_ids), cut.context, cut.stride, bos_id is not None)
    rows, others = EngineRows(llm), None if other is None else EngineRows(other)
    with _bar(len(windows)) as push:
        scores = score(rows, others, token_ids, windows, bos_id, on_window=push)
    result = summarize_scores(scores)
    found = document(measured, cut, bos_id, len(token_ids), result, rows, others)
    _print(found, result)
    if json_file is not None:
        import json

        with written("json", json_file) as file:
            text = json.dumps(_without_infinities(found), indent=2, allow_nan=False)
            file.write_text(text + "\n", encoding="utf-8")


def check_same_vocabulary(llm: "LLM", other: "LLM", text: str, token_ids: list[int]) -> None:
    """Raise `TokenizerError` unless both models have the same vocabulary on this text."""
    sizes = llm.config.vocab_size, other.config.vocab_size
    if sizes[0] != sizes[1]:
        raise TokenizerError(
            f"The model has a vocabulary of {sizes[0]} tokens, and the reference one of "
            f"{sizes[1]}: their probabilities cannot be compared token by token."
        )
    if other.tokenizer.encode(text, add_special_tokens=False) != token_ids:
        raise TokenizerError(
            "The model and the reference cut this text into different tokens: a reference needs "
            "the same vocabulary."
        )


def bos_token_of(llm: "LLM", wanted: bool | None) -> int | None:
    """Return the BOS token that starts each window, or None for none.

    Raises `OptionError` if it is wanted, and the tokenizer has none.
    """
    bos = llm.tokenizer.bos_token_id
    if wanted is None:
        return bos if bos is not None and llm.tokenizer.encode("a")[:1] == [bos] else None
    if wanted and bos is None:
        raise OptionError("--bos needs a tokenizer with a BOS token; this one has none.")
    return bos if wanted else None


def document(
    measured: Measured,
    cut: Cut,
    bos_id: int | None,
    num_tokens: int,
    result: "Result",
    rows: "EngineRows",
    others: "EngineRows | None",
) -> dict[str, Any]:
    """Return everything that was measured, and how, as a JSON document."""
    from dataclasses import asdict

    found: dict[str, Any] = {
        "text": measured.text,
        "tokens": num_tokens,
        "context": cut.context,
        "stride": cut.stride,
        "bos_token_id": bos_id,
        "model": _about(measured.model, measured.llm, rows),
        "reference": None,
        **asdict(result),
    }
    if measured.text == PYDOC:
        found["text"] = f"{PYDOC} of Python {sys.version.split()[0]}"
    if measured.other is not None and others is not None:
        found["reference"] = _about(str(measured.reference), measured.other, others)
    return found


def _without_infinities(value: Any) -> Any:
    """Return a document in which null stands for what JSON has no number for."""
    if isinstance(value, dict):
        return {name: _without_infinities(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinities(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _about(name: str, llm: "LLM", rows: "EngineRows") -> dict[str, Any]:
    described = llm.describe()
    return {
        "name": name,
        "weights": described["weights"],
        "kv_cache": described["kv cache"],
        "runner": described["runner"],
        "threads": int(described["threads"]),
        "stored_bytes": llm.stored_bytes,
        "stored_bits_per_weight": 8 * llm.stored_bytes / llm.num_parameters,
        "evaluated_tokens_per_second": rows.num_tokens / rows.seconds,
    }


def _print(found: dict[str, Any], result: "Result") -> None:
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    table = Table.grid("", Column(overflow="fold"), padding=(0, 2))
    for label, value in _lines(found, result).items():
        table.add_row(f"[bold]{label}[/bold]", Text(value))
    Console(highlight=False).print(table)


def _lines(found: dict[str, Any], result: "Result") -> dict[str, str]:
    """Return what is printed, by label."""
    least = found["context"] - found["stride"]
    bos = "no BOS" if found["bos_token_id"] is None else f"BOS (token {found['bos_token_id']})"
    lines = {
        "text": f"{found['text']}, {found['tokens']:,} tokens",
        "windows": f"{result.num_windows:,} of {found['context']:,} tokens, stride "
        f"{found['stride']:,}, {bos}",
        "scored": f"{result.num_scored:,} tokens, once each; after the first window, each follows "
        f"at least {least:,} others",
        **_of_model("model", found["model"]),
        **({} if found["reference"] is None else _of_model("reference", found["reference"])),
        "perplexity": str(result.perplexity),
    }
    if not math.isfinite(result.perplexity.value):
        lines["its logarithm"] = f"{result.mean_nll} nats per token"
    if result.comparison is not None:
        lines |= _of_comparison(result.comparison)
    if result.num_windows < 2:
        lines["intervals"] = "none: a bootstrap needs two windows or more"
    else:
        few = (
            "; too narrow, because the windows are few" if result.num_windows < FEW_WINDOWS else ""
        )
        lines["intervals"] = f"95 %, bootstrap over {result.num_windows:,} windows{few}"
    return lines


def _of_model(role: str, about: dict[str, Any]) -> dict[str, str]:
    speed = about["evaluated_tokens_per_second"]
    return {
        role: f"{about['name']}, weights {about['weights']}",
        f"{role}'s KV cache": about["kv_cache"],
        f"{role}'s size": f"{about['stored_bytes']:,} bytes on disk, "
        f"{about['stored_bits_per_weight']:.2f} bits per weight",
        f"{role}'s speed": f"{speed:,.0f} tokens/s of this evaluation, in {about['threads']} "
        f"threads, by {about['runner']}",
    }


def _of_comparison(comparison: "Comparison") -> dict[str, str]:
    shares = ", ".join(f"{name} {value:.3g}" for name, value in comparison.kl_percentiles.items())
    return {
        "perplexity of the reference": str(comparison.reference_perplexity),
        "ratio": f"{comparison.ratio} (perplexity / that of the reference, paired)",
        "KL divergence": f"{comparison.kl} nats per token",
        "its percentiles": shares,
        "same top token": str(comparison.same_top),
        "change of p, mean": f"{comparison.mean_change_of_p} (of the right token)",
        "change of p, RMS": str(comparison.rms_change_of_p),
    }


@contextmanager
def _bar(num_windows: int) -> Generator[Callable[[float], None], None, None]:
    """Show a bar with the perplexity so far on stderr while the block runs, on a terminal only."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda mean_logprob: None
        return
    columns = (
        TextColumn("windows"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("perplexity so far {task.fields[perplexity]:.2f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("windows", total=num_windows, perplexity=0.0)

        def push(mean_logprob: float) -> None:
            bar.update(task, advance=1, perplexity=math.exp(min(-mean_logprob, 700.0)))

        yield push
