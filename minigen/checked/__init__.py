"""Adapters around foreign parts: what they return is checked, and reported by the part's name.

minigen's own parts go unwrapped.
"""
