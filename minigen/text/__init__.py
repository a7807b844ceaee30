"""Bytes to token ids and back, and messages to prompts."""
