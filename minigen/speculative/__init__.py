"""Speculative decoding: cheap guesses of the next tokens, which one step of the model verifies."""
