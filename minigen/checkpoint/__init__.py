"""Weights and configurations as they are stored in files: safetensors and GGUF."""
