"""Chapter 23: Sharing prefixes."""
