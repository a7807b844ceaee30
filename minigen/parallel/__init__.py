"""Tensor and context parallelism: one model over several processes, and their messages."""
