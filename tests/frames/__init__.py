"""Frames against a real gateway in its own process: what a client sees on the wire, at every version."""
