"""Sluice as other programs see it: the commands, and `sluice.testing`, which is the whole public API.

The one idea: an installed Sluice puts nothing else on the import path. The program's rooms (its packages `gateway`,
`protocol`, `storage` and `pipeline`) are in `sluice/_rooms` of the wheel. Only Sluice's own processes can import them.
In a checkout the rooms are top-level directories. Decision 0021 gives the reasons.
"""
