"""Chapter 21: Memory in blocks."""
