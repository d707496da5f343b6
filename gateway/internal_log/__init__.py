"""What groups and transactions have in tables, as Kafka's coordinators write it into internal topics: for who reads it
there, and while somebody does. `writer.py` is where to start."""
