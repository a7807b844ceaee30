"""The report of `minigen doctor`: facts, findings with remedies, and the comparison of two."""
