"""A gateway for tests: `sluice test-server`, which `sluice.testing` starts and controls.

The one idea: faults are stages of a node that only this room makes. `sluice serve` never imports this room, so no
production start can fail a request on purpose.
"""
