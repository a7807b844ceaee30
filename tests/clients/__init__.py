"""Scenarios of other projects' clients; each file runs in its client's own environment.

`python -m tools.clients` starts them, with the server's address in the environment variables. The
first line of a scenario's docstring is its name in the table.
"""
