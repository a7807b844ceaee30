"""Chapter 32: FlashAttention."""
