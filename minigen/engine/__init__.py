"""The engine: it schedules requests and runs the model, step by step."""
