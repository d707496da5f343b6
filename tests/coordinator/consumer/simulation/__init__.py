"""A consumer group under a seeded schedule of lost, late, repeated and reordered requests, restarts and moving topics.

Clients are modelled by what they really own, and the coordinator is run as the gateway runs it (store, then reply).
After every step a referee compares the two. Requests of one connection arrive in order. A client that waited too long
opens another connection, and requests left on the old one may still arrive, at any time.
"""
