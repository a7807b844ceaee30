"""The OpenAI API: schema, routes, requests and responses."""
