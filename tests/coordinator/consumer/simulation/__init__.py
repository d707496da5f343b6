"""A consumer group under a seeded schedule of lost, late, repeated and reordered requests, restarts and moving topics.

The one idea: clients are modelled by what they really own, the coordinator is run as the gateway runs it (store, then
reply), and after every step a referee compares the two. Requests of one connection arrive in order; a client that
waited too long opens the next one, and what is left on the old one may still arrive, at any time.
"""
