"""Diagnosis as a method: the broken systems of the chapter, diagnosed and cured."""
