"""A tiny Llama in GGUF with random float weights, a vocabulary with merges and a chat template."""

from pathlib import Path

import numpy as np
import torch

from minigen.tokenizer.tokenizer import _BYTE_OF_LETTER
from tests.gguf_files import permuted, write_gguf

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 256, 2, 4, 2, 16
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = ["th", "he", "the", "Ġthe", "Ġa", "in", "an", "and", "Ġand"]
MERGES = ["t h", "h e", "th e", "Ġ the", "Ġ a", "i n", "a n", "an d", "Ġ and"]


def vocabulary() -> list[str]:
    """Return the tokens: three special ones, the 256 bytes, and a few merges."""
    return [*SPECIALS, *sorted(_BYTE_OF_LETTER), *WORDS]


def metadata() -> dict[str, object]:
    """Return the keys of the model's GGUF; it has a type of token that is not a word, too."""
    tokens = vocabulary()
    types = [3 if token in SPECIALS else 1 for token in tokens]
    return {
        "general.name": "tiny",
        "llama.block_count": LAYERS,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": FFN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.key_length": HEAD_DIM,
        "llama.attention.value_length": HEAD_DIM,
        "llama.rope.dimension_count": HEAD_DIM,
        "llama.rope.freq_base": 10_000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": len(tokens),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def write_tiny(path: Path, seed: int = 3, tied: bool = True) -> dict[str, torch.Tensor]:
    """Write the model as a GGUF in F32; return its weights under transformers' names."""
    generator = torch.Generator().manual_seed(seed)

    def random(rows: int, columns: int) -> torch.Tensor:
        return 0.15 * torch.randn(rows, columns, generator=generator)

    vocab = len(vocabulary())
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    weights = {"token_embd.weight": 4 * random(vocab, HIDDEN)}
    if not tied:
        weights["output.weight"] = random(vocab, HIDDEN)
    for layer in range(LAYERS):
        shapes = {
            **{"attn_q": (q, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN)},
            **{"attn_output": (HIDDEN, q), "ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN)},
            "ffn_down": (HIDDEN, FFN),
        }
        for name, shape in shapes.items():
            weights[f"blk.{layer}.{name}.weight"] = random(*shape)
        for name in ("attn_norm", "ffn_norm"):
            weights[f"blk.{layer}.{name}.weight"] = 1 + random(1, HIDDEN)[0]
    weights["output_norm.weight"] = 1 + random(1, HIDDEN)[0]
    stored: dict[str, tuple[np.ndarray, None]] = {}
    for name, weight in weights.items():
        heads = HEADS if "attn_q" in name else KV_HEADS if "attn_k" in name else 0
        stored[name] = ((permuted(weight, heads) if heads else weight).numpy(), None)
    write_gguf(path, "llama", metadata(), stored)
    return weights
