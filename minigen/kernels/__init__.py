"""Matrix products, attention and sampling for one kind of processor each."""
