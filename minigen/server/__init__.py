"""minigen over HTTP."""
