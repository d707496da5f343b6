"""kcat: the command line of librdkafka."""
