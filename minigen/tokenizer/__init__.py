"""Converts text to token ids and back, and chat messages to prompts."""
