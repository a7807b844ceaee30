"""Products and attention for one kind of machine each; the rest of minigen works without them."""
