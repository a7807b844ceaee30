"""One small program per engine, run by that engine's own Python."""
