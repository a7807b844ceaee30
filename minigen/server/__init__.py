"""The HTTP server in front of the engine's thread."""
