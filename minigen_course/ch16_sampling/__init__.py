"""Chapter 16: Choosing the next token."""
