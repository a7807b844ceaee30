"""Chapter 11: Weights on disk: safetensors and GGUF, byte by byte."""
