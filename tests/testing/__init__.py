"""The test server and its fixtures, used as users do."""
