"""Chapter 41: One model on several devices."""
