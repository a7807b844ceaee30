"""Chapter 33: Paged attention on a GPU."""
