"""What a container engine is needed for: image, compose file, testcontainers, and machines that have nothing."""
