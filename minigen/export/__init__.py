"""Quantized models written to files: GGUF, and directories of compressed-tensors."""
