"""Quantization: methods that put a model's weights on a grid of few values, in memory."""
