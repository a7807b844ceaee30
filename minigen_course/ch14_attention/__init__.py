"""Chapter 14: Attention: causal, with grouped heads."""
