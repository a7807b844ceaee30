"""Chapter 00: The finished engine, and the memory that a model needs."""
