"""Sampling: parameters, filters, random draws and log probabilities."""
