"""Figures and explorables, each drawn from data that is handed in."""
