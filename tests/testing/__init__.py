"""The test server and its fixtures, as users meet them."""
