"""Apache Kafka itself, as the measure: put together from Maven Central and run as one node."""
