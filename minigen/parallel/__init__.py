"""Tensor parallelism: one model split over several processes, and the messages between them."""
