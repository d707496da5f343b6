"""Steps that tests of several rooms (top-level packages) share."""
