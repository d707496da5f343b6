"""Stock Kafka clients in their own languages against a real gateway, and the report card of their results.

Each folder holds one client's programs and a `suite.toml`. `run` starts the programs, `checker` judges the delivery
logs that their group scenarios write, and `report` writes the outcomes to docs/compatibility.md and .json. No module at
this level knows how a client works.
"""
