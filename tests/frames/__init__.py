"""Frames against a real gateway in its own process: the bytes that a client sees, at every version."""
