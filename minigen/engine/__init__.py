"""Many requests, one model, one loop."""
