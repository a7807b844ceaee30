"""The configuration of a small model with all that a kernel may meet: biases and a window."""

from minigen.checkpoint.model_config import ModelConfig

CONFIG = ModelConfig(
    family="llama",
    vocab_size=97,
    hidden=64,
    num_layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    ffn=96,
    max_positions=128,
    norm_eps=1e-6,
    rope_theta=1e4,
    rope_linear_factor=1.0,
    rope_scaling=None,
    tied_embeddings=False,
    qkv_bias=True,
    out_bias=False,
    mlp_bias=False,
    qk_norm=False,
    sliding_windows=(None, 20),
    bos_token_id=None,
    eos_token_ids=(),
)
