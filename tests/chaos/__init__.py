"""Faults under load against a real gateway and a real Postgres: what was acknowledged must be there afterwards."""
