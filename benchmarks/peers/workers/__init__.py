"""One small program for each engine, run by that engine's own Python."""
