"""The default model in the formats that other engines read, all made from the same GGUF.

Every format is written once, into its own folder, which gets its final name when it is complete, so
an interrupted run is repaired by the next.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.gguf_float32 import write_float32
from benchmarks.peers.environments import Environments
from minigen.checkpoint.checkpoint import Checkpoint, open_checkpoint
from minigen.checkpoint.gguf import read_gguf
from minigen.checkpoint.gguf_mapping import config_dict
from minigen.tokenizer.gguf import read_vocabulary

GGUF, BFLOAT16_GGUF, Q8_0, Q4_0 = "the file as it is", "bf16 GGUF", "Q8_0 GGUF", "Q4_0 GGUF"
DIRECTORY, INT8_DIRECTORY, ONNX_INT4 = "bf16 directory", "int8 directory", "int4 ONNX"
FILE_TYPES = {BFLOAT16_GGUF: "BF16", Q8_0: "Q8_0", Q4_0: "Q4_0"}  # llama.cpp's names


class Models:
    """Finds the formats of one model in a folder, and writes the missing ones."""

    def __init__(self, source: Path, folder: Path, environments: Environments):
        self.source, self.folder, self.environments = source, folder, environments

    def path(self, form: str) -> Path:
        """Return the path of the model in this format; write it first if it is missing."""
        if form == GGUF:
            return self.source
        if form in FILE_TYPES:
            return self._made(f"{FILE_TYPES[form]}.gguf", lambda new: self._quantise(form, new))
        if form == DIRECTORY:
            return self._made("bf16", lambda new: write_directory(self.source, new))
        if form == INT8_DIRECTORY:
            return self._made("w8a8", lambda new: write_int8_directory(self.source, new))
        assert form == ONNX_INT4, form
        return self._made("onnx-int4", self._build_onnx)

    def _made(self, name: str, make: Callable[[Path], None]) -> Path:
        path = self.folder / name
        if not path.exists():
            print(f"writing {name}", flush=True)
            unfinished = path.with_name(f"unfinished-{name}")
            if unfinished.is_dir():
                shutil.rmtree(unfinished)
            self.folder.mkdir(parents=True, exist_ok=True)
            make(unfinished)
            unfinished.rename(path)
        return path

    def _quantise(self, form: str, target: Path) -> None:
        source = self._made("F32.gguf", lambda new: write_float32(self.source, new))
        arguments = [str(source), str(target), FILE_TYPES[form]]
        self.environments.run("llama_cpp", ["-c", QUANTISE, *arguments])

    def _build_onnx(self, target: Path) -> None:
        source = self.path(DIRECTORY)
        builder = ["-m", "onnxruntime_genai.models.builder", "-p", "int4", "-e", "cpu"]
        arguments = ["-i", str(source), "-o", str(target), "-c", str(self.folder / "builder")]
        self.environments.run("onnxruntime_genai", [*builder, *arguments])


QUANTISE = """
import sys, llama_cpp as llama
source, target, kind = sys.argv[1:]
params = llama.llama_model_quantize_default_params()
params.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{kind}")
params.nthread = 2
sys.exit(llama.llama_model_quantize(source.encode(), target.encode(), params))
"""


def write_directory(source: Path, folder: Path) -> None:
    """Write a GGUF in transformers' layout: safetensors in bfloat16, configuration, tokenizer."""
    checkpoint = open_checkpoint(source)
    tensors = {
        name: stored.dequantize().to(torch.bfloat16) for name, stored in checkpoint.tensors.items()
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    _write_json(folder / "config.json", model_config(source))
    _write_tokenizer(checkpoint, folder)


def write_int8_directory(source: Path, folder: Path) -> None:
    """Write a GGUF with int8 weights, rounded to nearest with one scale per row.

    The format is compressed-tensors' "int-quantized", with which engines also round activations to
    int8, one scale per token. Embedding, head and norms keep their precision.
    """
    checkpoint = open_checkpoint(source)
    tensors: dict[str, Tensor] = {}
    for name, stored in checkpoint.tensors.items():
        weight = stored.dequantize()
        if name.endswith("_proj.weight"):
            tensors[name], scale = rounded_to_int8(weight)
            tensors[f"{name}_scale"] = scale.to(torch.bfloat16)
        else:
            tensors[name] = weight.to(torch.bfloat16)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {**model_config(source), "quantization_config": INT8_BY_TOKEN_AND_ROW}
    _write_json(folder / "config.json", config)
    _write_tokenizer(checkpoint, folder)


def rounded_to_int8(
    weight: Float[Tensor, "rows columns"],
) -> tuple[Tensor, Float[Tensor, "rows 1"]]:
    """Return int8 numbers and a scale per row; number times scale is close to the weight."""
    scale = (weight.abs().amax(dim=1, keepdim=True) / 127).clamp(min=1e-8)
    scale = scale.to(torch.bfloat16).float()  # as it will be stored
    return (weight / scale).round().clamp(-127, 127).to(torch.int8), scale


INT8_BY_TOKEN_AND_ROW = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "channel",
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def model_config(source: Path) -> dict[str, Any]:
    """Return the GGUF's metadata as transformers' `config.json`."""
    config = {name: value for name, value in config_dict(read_gguf(source)).items() if value}
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        **config,
    }


def _write_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    assert checkpoint.gguf_metadata is not None
    vocabulary = read_vocabulary(checkpoint.gguf_metadata)
    vocabulary.backend.save(str(folder / "tokenizer.json"))
    names = checkpoint.gguf_metadata["tokenizer.ggml.tokens"]
    metadata = checkpoint.gguf_metadata
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": names[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": names[metadata["tokenizer.ggml.eos_token_id"]],
        "chat_template": metadata["tokenizer.chat_template"],
    }
    _write_json(folder / "tokenizer_config.json", config)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
