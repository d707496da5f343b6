"""Groups in mode `drain` with members in different languages, each a program of another suite."""
