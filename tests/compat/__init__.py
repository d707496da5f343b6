"""Stock Kafka clients in their own languages against a real gateway, and the report card of how they fare.

Each folder holds one client's programs and a `suite.toml`; `run` starts them, `checker` judges the delivery logs that
their group scenarios write, `report` turns the outcomes into docs/compatibility.md and .json. Nothing in here knows
how a client works.
"""
