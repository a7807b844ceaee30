"""Chapter 51: A server that OpenAI clients can use."""
