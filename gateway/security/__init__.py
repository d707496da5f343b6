"""Authenticate a connection's peer, decide what it may do to which resource, and encrypt its bytes."""
