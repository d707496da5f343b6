"""How much clients may have of a node."""
