"""kafka-python: a client in pure Python."""
