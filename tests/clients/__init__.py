"""Stock clients against a gateway in its own process. The tests use only what any client can see."""
