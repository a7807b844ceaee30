"""ASGI middleware: access log, authentication, admission, time limits."""
