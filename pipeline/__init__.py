"""Topics as tables, tables as topics, and what a consumer group did: jobs on Apache Spark.

A client of a Kafka cluster like any other: it knows Kafka's protocol through its clients, Postgres through JDBC and
Delta through Spark, and nothing of the other rooms. `cli.py` names the jobs; each is a package whose `job.py` reads
arguments and moves frames, and whose transforms are functions of DataFrames.
"""
