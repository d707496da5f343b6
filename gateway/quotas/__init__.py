"""Limits on what clients may use of a node."""
