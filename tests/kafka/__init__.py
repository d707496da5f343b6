"""Apache Kafka itself, for comparison: assembled from Maven Central and run as one node."""
