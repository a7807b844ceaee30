"""A part with a mistake for each bug hunt: it was made in real engines, and looks right."""
