"""Chapter 25: The engine, put together."""
