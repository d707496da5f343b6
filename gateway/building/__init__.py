"""Builders of a node: one for each room, and each returns a frozen value with the parts that it made.

The one idea: a part receives everything that it needs when it is made. So the order of the builders in
`gateway/node.py` shows who depends on whom. Two parts that need each other are the exception. The later one is then
connected by a method of the earlier one: `Membership.connect`, `Leases.listen`, `Catalog.listen`, `Catalog.place_by`,
`SharePartitions.report_dead_letters`.
"""
