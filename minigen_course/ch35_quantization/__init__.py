"""Chapter 35: Weights and keys in few bits."""
