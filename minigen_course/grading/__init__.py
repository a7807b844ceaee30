"""Exercises: statements, checks, stubs, workspaces and bug hunts."""
