"""Chapter 15: The whole forward pass."""
