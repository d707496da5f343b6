"""Share groups (KIP-932): members share partitions, and no member ever has to release one."""
