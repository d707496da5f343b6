"""Kafka for tests."""
