"""A model on disk: a directory of safetensors or a GGUF file, opened but not yet read."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minigen.checkpoint.config_json import read_config, read_config_of, read_json
from minigen.checkpoint.model_config import ModelConfig
from minigen.checkpoint.safetensors import StoredTensor, check_tensors, read_raw
from minigen.checkpoint.shared import Shared
from minigen.errors import FileFormatError, ModelNotFoundError
from minigen.model.transformer import expected_tensors
from minigen.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from minigen.tokenizer.chat_template import ChatTemplate


_VOCABULARY = {f"tokenizer.ggml.{name}" for name in ("tokens", "merges", "scores", "token_type")}


@dataclass(frozen=True)
class Checkpoint:
    """A model's configuration and its stored tensors, under transformers' names, all checked.

    `gguf_metadata` is None for a directory. `shared` is what engines of this object use together; a
    copy by `dataclasses.replace`, which may have other tensors, has its own.
    """

    path: Path
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]
    gguf_metadata: Mapping[str, Any] | None
    shared: Shared = field(default_factory=Shared, init=False, repr=False, compare=False)

    @property
    def form(self) -> str:
        """The file format and the stored number formats, the most common first."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            sizes[tensor.kind] = sizes.get(tensor.kind, 0) + tensor.num_bytes
        kinds = sorted(sizes, key=lambda kind: -sizes[kind])
        name = "safetensors" if self.gguf_metadata is None else "GGUF"
        return f"{name} ({', '.join(kinds)})"

    @property
    def num_bytes(self) -> int:
        """Total size of the stored tensors, in bytes."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def num_parameters(self) -> int:
        """Number of parameters in all tensors."""
        expected = expected_tensors(self.config)
        total = 0
        for shape in expected.values():
            count = 1
            for size in shape:
                count *= size
            total += count
        return total

    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer. Raises `TokenizerError` if it does not fit the model."""
        if self.gguf_metadata is None:
            tokenizer = Tokenizer.from_directory(self.path)
        else:
            tokenizer = Tokenizer.from_gguf(self.gguf_metadata)
        tokenizer.check_vocabulary(self.config.vocab_size)
        return tokenizer

    def without_vocabulary(self) -> "Checkpoint":
        """Return the same checkpoint without the lists that only a tokenizer needs.

        They are some 10 MB of Python's objects, which an engine would keep as long as it lives.
        """
        if self.gguf_metadata is None:
            return self
        kept = {name: each for name, each in self.gguf_metadata.items() if name not in _VOCABULARY}
        return replace(self, gguf_metadata=kept)

    def chat_template(self) -> "ChatTemplate | None":
        """Return the model's chat template, or None if it has none."""
        from minigen.tokenizer.chat_template import ChatTemplate

        if self.gguf_metadata is None:
            return ChatTemplate.from_directory(self.path)
        return ChatTemplate.from_gguf(self.gguf_metadata)


@dataclass(frozen=True)
class ModelFiles:
    """All that an engine reads of a model: engines of one such object share what they can."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    chat_template: "ChatTemplate | None"


def read_model(path: Path) -> ModelFiles:
    """Open a model's directory or GGUF file, and read its tokenizer and its chat template.

    Raises a `MinigenError` as `open_checkpoint` does.
    """
    checkpoint = open_checkpoint(path)
    tokenizer, chat_template = checkpoint.tokenizer(), checkpoint.chat_template()
    return ModelFiles(checkpoint.without_vocabulary(), tokenizer, chat_template)


def open_checkpoint(path: Path, sizes: Mapping[str, int] | None = None) -> Checkpoint:
    """Open a model's directory or GGUF file: read headers and configuration, map the rest.

    If the files with weights end after their headers, `sizes` are the bytes of the whole files by
    name; the tensors then have a shape and no bytes (torch's meta device). Raises a `MinigenError`
    that states what is wrong with the files, and where.
    """
    try:
        if path.is_dir():
            return _open_directory(path, sizes)
        return _open_gguf(path, sizes)
    except FileNotFoundError:
        raise ModelNotFoundError(f"{path} does not exist.") from None
    except OSError as error:
        raise FileFormatError(f"{path} cannot be read: {error.strerror or error}.") from None


def _open_directory(path: Path, sizes: Mapping[str, int] | None) -> Checkpoint:
    config = read_config_of(path)
    expected = expected_tensors(config)
    kept = {
        name: each for name, each in read_raw(path, sizes).items() if not _is_leftover(name, config)
    }
    quantization = read_json(path / "config.json").get("quantization_config")
    if quantization is None:
        tensors = {name: each.stored() for name, each in kept.items()}
    else:
        from minigen.checkpoint.quantized.assemble import assemble

        tensors = assemble(kept, quantization, expected, str(path / "config.json"))
    check_tensors(tensors, expected, str(path))
    return Checkpoint(path, config, tensors, None)


def _is_leftover(name: str, config: ModelConfig) -> bool:
    """Return whether some exporters write this tensor although other values determine it."""
    return name.endswith("rotary_emb.inv_freq") or (
        config.tied_embeddings and name == "lm_head.weight"
    )


def _open_gguf(path: Path, sizes: Mapping[str, int] | None) -> Checkpoint:
    from minigen.checkpoint.gguf import read_gguf
    from minigen.checkpoint.gguf_mapping import config_dict, named_tensors

    file = read_gguf(path, None if sizes is None else sizes[path.name])
    config = read_config(config_dict(file), where=str(path))
    tensors = named_tensors(file, config.q_heads, config.kv_heads)
    expected = expected_tensors(config)
    if "rope_freqs.weight" in tensors:
        expected["rope_freqs.weight"] = (config.head_dim // 2,)
    check_tensors(tensors, expected, str(path))
    return Checkpoint(path, config, tensors, file.metadata)
