"""Chapter 22: Paged attention."""
