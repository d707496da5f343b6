"""A standing checker: workloads, faults and a model that judges the answers that clients received (docs/trust.md)."""
