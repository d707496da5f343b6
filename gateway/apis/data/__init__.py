"""Handlers of records: Produce, Fetch and ShareFetch, and what they and others ask about offsets in the log."""
