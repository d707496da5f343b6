"""The console: pages that show the cluster to a person, and carry out what that person confirms.

`server.py` owns the socket and the routes, `guard.py` decides which requests may pass, `kafka.py` is the only way to
the node's services. Every other module turns answers of that seam into JSON.
"""
