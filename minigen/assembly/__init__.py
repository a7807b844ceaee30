"""Choose the implementations for a machine, and build an engine from them."""
