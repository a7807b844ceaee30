"""The KV cache of the layer-by-layer runner in codes: its memory, and the pool that holds it."""

from dataclasses import dataclass

import torch

from minigen.checkpoint.model_config import ModelConfig
from minigen.config import EngineConfig, SpeculativeConfig
from minigen.engine.model_runner import BlockPool
from minigen.errors import OptionError
from minigen.kv_cache.block_allocator import blocks_needed
from minigen.kv_cache.block_manager import BlockManager
from minigen.kv_cache.fp8 import Fp8KVPool, fp8_block_bytes
from minigen.kv_cache.quantized import BITS, QuantizedKVPool, block_bytes, tails_needed

CODED = ("fp8", *BITS)  # by the names of `kv_cache_dtype`


@dataclass(frozen=True)
class CodedCache:
    """A KV cache in codes for a model and an engine; `dtype` is what the runner computes in.

    Raises `OptionError` if the sizes do not fit.
    """

    config: ModelConfig
    options: EngineConfig
    dtype: torch.dtype

    def __post_init__(self) -> None:
        head_dim = self.config.head_dim
        if head_dim % (8 // self._bits):
            raise OptionError(
                f"kv_cache_dtype={self.options.kv_cache_dtype!r} packs {8 // self._bits} numbers "
                f"into a byte, but the model's heads have {head_dim}."
            )

    @property
    def _bits(self) -> int:
        return BITS.get(self.options.kv_cache_dtype, 8)

    @property
    def _in_fp8(self) -> bool:
        return self.options.kv_cache_dtype == "fp8"

    @property
    def token_bytes(self) -> int:
        """The bytes of one token's key and value in one layer, rounded up."""
        sizes = self.options.block_size, self.config.kv_heads, self.config.head_dim
        total = fp8_block_bytes(*sizes) if self._in_fp8 else block_bytes(self._bits, *sizes)
        return -(-total // self.options.block_size)

    @property
    def fixed_bytes(self) -> int:
        """The bytes of the tails, which hold the tokens of unfilled blocks in full precision."""
        if self._in_fp8:
            return 0
        numbers = 2 * self.options.block_size * self.config.kv_heads * self.config.head_dim
        return self._num_tails * self.config.num_layers * numbers * self.dtype.itemsize

    @property
    def _num_kept(self) -> int:
        """The blocks at a sequence's end that a step of speculation may roll back to."""
        drafts = (self.options.speculation or SpeculativeConfig()).num_speculative_tokens
        return 1 + blocks_needed(drafts, self.options.block_size)

    @property
    def _num_tails(self) -> int:
        return tails_needed(self.options.max_num_seqs, self._num_kept)

    def describe(self) -> str:
        """Return how much memory the codes take, and what is not in codes."""
        text = f"{self.config.num_layers * self.token_bytes:,} bytes per token"
        if self._in_fp8:
            return text
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{text}, and {self.fixed_bytes:,} bytes for blocks that are not full, in {dtype}"

    def pool(self, manager: BlockManager, num_blocks: int) -> BlockPool:
        """Return the memory of all blocks."""
        heads = (self.config.kv_heads, self.options.block_size, self.config.head_dim)
        sizes = (self.config.num_layers, num_blocks, *heads)
        if self._in_fp8:
            return Fp8KVPool(*sizes)
        tails = self._num_tails, self._num_kept, manager.filling
        return QuantizedKVPool(*sizes, self.dtype, self._bits, *tails)
