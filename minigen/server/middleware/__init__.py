"""ASGI middleware: access log, authentication, admission control, timeouts."""
