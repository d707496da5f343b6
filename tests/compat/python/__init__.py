"""What the suites of the Python clients share: the scenarios, written once against the small interface in `client`."""
