"""Exercises: statements, checks, stubs and bug hunts."""
