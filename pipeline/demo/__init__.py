"""The whole pipeline in one command, on real records."""
