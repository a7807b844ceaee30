"""Chapter 13: RMSNorm, rotary embedding, SwiGLU."""
