"""Chapter 53: Answers of a given form."""
