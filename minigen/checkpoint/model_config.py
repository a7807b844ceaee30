"""A model's configuration: one frozen value that describes everything except the weights."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling of slow rotations for longer contexts (Llama 3.1 report, appendix)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class ModelConfig:
    """Everything that the forward pass needs to know about a model, except its weights."""

    family: str
    vocab_size: int
    hidden: int
    num_layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_linear_factor: float
    rope_scaling: RopeScaling | None
    tied_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in the KV cache, at 2 bytes per number."""
        return 2 * self.num_layers * self.kv_heads * self.head_dim * 2
