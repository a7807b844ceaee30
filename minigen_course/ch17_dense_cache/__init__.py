"""Chapter 17: Prefill, decode, and the memory wall."""
