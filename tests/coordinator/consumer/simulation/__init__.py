"""A simulation of a consumer group. A seed chooses lost, late, repeated and reordered requests, restarts, and changes
of topics.

The simulation knows which partitions each client really owns. The coordinator runs as in the gateway (store, then
reply). After every step a referee compares the two. Requests of one connection arrive in order. A client that waited
too long opens another connection, and requests left on the old one may still arrive, at any time.
"""
