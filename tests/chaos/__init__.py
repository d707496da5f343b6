"""Faults under load against a real gateway and a real Postgres. Afterwards no acknowledged record may be missing."""
