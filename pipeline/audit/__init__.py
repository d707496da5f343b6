"""Describe a topic's records, and advise its producers."""
