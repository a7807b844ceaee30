"""The assignment of chapter 35."""
