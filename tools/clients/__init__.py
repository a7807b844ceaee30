"""Run other projects' clients, unchanged, against `minigen serve`, and record what works."""
