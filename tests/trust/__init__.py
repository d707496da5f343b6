"""A standing checker: workloads, faults and a model that judges what every client was told (docs/trust.md)."""
