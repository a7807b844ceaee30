"""Tool calls: how a model learns of its tools, how it must answer, and how its answer is read."""
