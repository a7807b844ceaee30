"""Reads the safetensors of quantised models: codes, scales and zero points of several schemes."""
