"""Measure the effect and the cost of rebalances from the coordinator's journal."""
