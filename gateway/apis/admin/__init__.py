"""Handlers that administrators' clients call: topics, settings, permissions, users and the cluster's nodes."""
