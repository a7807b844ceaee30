"""Intel AMX: tile registers, and the matrix products that they compute."""
