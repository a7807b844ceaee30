"""OpenAI's Responses API: its requests, and its responses as objects and as events."""
