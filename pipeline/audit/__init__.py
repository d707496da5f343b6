"""What is in a topic, and what its producers could do better."""
