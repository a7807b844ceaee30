"""Implementations that a caller passes in: found by name, and checked at each call.

minigen's own implementations are used without a wrapper.
"""
