"""Write the logits of one prompt, by transformers: `python -m tests.golden.make_logits`.

Chapter 15 compares its own logits with them.
"""

import json

import torch
from transformers import LlamaConfig, LlamaForCausalLM, __version__

from minigen import hub
from minigen.checkpoint.checkpoint import Checkpoint, open_checkpoint
from minigen_course.ch15_transformer.lesson import STORED

PROMPT = "The old lighthouse stood on the"
EVERY = 384  # of the 49,152 tokens, so 128 logits per position are stored


@torch.inference_mode()
def transformers_logits(checkpoint: Checkpoint, token_ids: list[int]) -> torch.Tensor:
    """Return the logits after each token, computed by transformers from a Llama checkpoint."""
    config = checkpoint.config
    sizes = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden,
        intermediate_size=config.ffn,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.q_heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=config.max_positions,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tied_embeddings,
    )
    theirs = LlamaForCausalLM(sizes).eval()
    weights = {name: stored.dequantize() for name, stored in checkpoint.tensors.items()}
    found = theirs.load_state_dict(weights, strict=False)
    assert found.missing_keys == ["lm_head.weight"]  # which is the embedding
    assert found.unexpected_keys == []
    logits: torch.Tensor = theirs(torch.tensor([token_ids])).logits[0]
    return logits


def main() -> None:
    """Compute the logits, and store every 384th of them."""
    checkpoint = open_checkpoint(hub.resolve(hub.DEFAULT_MODEL))
    token_ids = checkpoint.tokenizer().encode(PROMPT)
    logits = transformers_logits(checkpoint, token_ids)
    vocab_ids = list(range(0, checkpoint.config.vocab_size, EVERY))
    rows = [[round(each, 4) for each in row] for row in logits[:, vocab_ids].tolist()]
    found = {
        "prompt": PROMPT,
        "version": __version__,
        "token_ids": token_ids,
        "log_sum_exp": [round(each, 4) for each in logits.logsumexp(-1).tolist()],
        "vocab_ids": vocab_ids,
        "logits": rows,
    }
    lines = [f"{json.dumps(name)}: {json.dumps(each)}" for name, each in found.items()]
    STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
