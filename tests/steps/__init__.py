"""Steps that tests of several rooms share."""
