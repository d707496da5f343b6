"""Handlers of records: Produce, Fetch and ShareFetch, and the APIs that ask for offsets in the log."""
