"""What `minigen doctor` finds out: a report of facts, what follows from it, and how two differ."""
