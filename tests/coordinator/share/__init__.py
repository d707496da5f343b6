"""Share groups and share partitions, by values and by simulation."""
