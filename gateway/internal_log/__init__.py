"""Groups and transactions as the records that Kafka's coordinators write to internal topics, written while a client
reads them. Start with `writer.py`."""
