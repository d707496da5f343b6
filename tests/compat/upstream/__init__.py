"""Test suites of the clients' own projects, run as they are against the gateway."""
