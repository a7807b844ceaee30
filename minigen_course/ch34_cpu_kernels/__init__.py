"""Chapter 34: The same race on a CPU."""
