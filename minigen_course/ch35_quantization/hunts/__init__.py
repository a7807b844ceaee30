"""Further bug hunts of chapter 35, beside the one of its notebook."""
