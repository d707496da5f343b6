"""Sluice as other programs see it: the commands, and `sluice.testing`, which is the whole public API.

The one idea: an installed Sluice puts nothing else on the import path. The program's rooms (`gateway`, `protocol`,
`storage`, `pipeline`) lie in `sluice/_rooms` of the wheel and are importable in Sluice's own processes only. In a
checkout the rooms are top-level directories. Decision 0021 gives the reasons.
"""
