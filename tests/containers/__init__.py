"""Tests that need a container engine: image, compose file, testcontainers, and bare machines."""
