"""Jobs on Apache Spark that copy topics into tables, tables into topics, and analyse consumer groups.

The pipeline is a client of any Kafka cluster. It reaches Kafka through Kafka's clients, Postgres through JDBC, and
Delta and Iceberg through Spark; it imports no other room. `cli.py` names the jobs. Each job is a package: `job.py`
reads arguments and does the I/O, and its transforms are functions of DataFrames.
"""
