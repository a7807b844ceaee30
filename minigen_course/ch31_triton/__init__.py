"""Chapter 31: First kernels in Triton."""
