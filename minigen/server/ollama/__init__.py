"""The Ollama API: schema, routes, and conversion to the engine's requests."""
