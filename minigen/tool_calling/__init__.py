"""Tool calls: what a model is told of its tools, how it must answer, and how its answer is read."""
