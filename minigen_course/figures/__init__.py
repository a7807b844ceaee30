"""Figures that several chapters use, each drawn from the data that is passed in."""
