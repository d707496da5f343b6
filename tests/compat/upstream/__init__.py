"""Test suites of the clients' own projects, run unchanged against the gateway."""
