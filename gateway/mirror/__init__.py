"""`sluice mirror`: copy topics and the offsets of groups from one cluster to another.

The one idea: a record keeps its offset. If the target is Sluice, the mirror appends to its log in Postgres, where the
position in the source is the end of the log (`storage/mirror.py`). Topics and groups go by Kafka's protocol.
"""
