"""Faults under load against a real gateway and a real Postgres: afterwards every acknowledged record must be there."""
