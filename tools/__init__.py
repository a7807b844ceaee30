"""The project's own commands; the modules that set things up need only the standard library."""
