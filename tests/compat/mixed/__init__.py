"""One cooperative group with members in different languages, each a program of another suite."""
