"""Groups in mode `drain` whose members are written in different languages, each a program of another suite."""
