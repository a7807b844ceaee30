"""Chapter 12: Text to tokens and back."""
