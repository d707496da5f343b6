"""Scenarios that the suites of the Python clients share, written once against the small interface in `client`."""
