"""Chapter 52: Latency, goodput, and what to do about them."""
