"""Implementations that the user passes in: found by name, and checked at each call.

minigen's own implementations run without a checking wrapper.
"""
