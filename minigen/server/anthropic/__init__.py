"""Anthropic's Messages API: schema, routes, and conversion to and from the engine's requests."""
