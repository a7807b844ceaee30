"""Tracing: the events that the engine emits, and the summaries made from them."""
