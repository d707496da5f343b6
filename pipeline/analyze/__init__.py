"""What rebalances did, and what they cost, from the coordinator's journal."""
