"""Chapter 36: Several tokens per step."""
