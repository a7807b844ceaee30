"""The Ollama API: schema, routes, and conversion to and from the engine's requests."""
