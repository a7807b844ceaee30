"""Chapter 24: Continuous batching."""
