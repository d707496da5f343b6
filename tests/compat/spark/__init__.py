"""PySpark with Spark's own Kafka connector: batch and streaming, source and sink, in one Spark session."""
