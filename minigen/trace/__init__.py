"""What the engine reports of its work, and the views that are made of it."""
