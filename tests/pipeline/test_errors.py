"""Explanations of errors from other software: one line for the cause, one for the next step."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException

from pipeline.errors import PipelineError, explain

JAVA = """An error occurred while calling o68.sql.
: {outer}
\tat org.apache.spark.sql.delta.commands.CreateDeltaTableCommand.run(CreateDeltaTableCommand.scala:188)
{causes}\t... 70 more
"""


class Py4JJavaError(Exception):
    """An error like py4j's own, with a complete Java trace."""


def java(outer: str, *causes: str) -> Py4JJavaError:
    told = "".join(f"Caused by: {cause}\n\tat java.base/java.lang.Thread.run(Thread.java:840)\n" for cause in causes)
    return Py4JJavaError(JAVA.format(outer=outer, causes=told))


class CapturedError(Exception):
    """An error like Spark's own: only its trace contains the causes."""

    def __init__(self, words: str, trace: str) -> None:
        super().__init__(words)
        self._stackTrace = trace


def captured(words: str, *causes: str) -> CapturedError:
    return CapturedError(words, str(java(words, *causes)))


@pytest.mark.parametrize(
    ("error", "cause", "step"),
    [
        (java("org.apache.spark.SparkException: Job aborted.", "java.io.IOException: No space left on device"),
         "There is no space left where the job writes.", "Free some"),
        (OSError(28, "No space left on device"), "There is no space left where the job writes.", "Free some"),
        (PermissionError(13, "Permission denied", "/lake"), "A file or folder may not be read or written", "doctor"),
        (NotADirectoryError(20, "Not a directory", "/lake/file/out"), "A folder that the job writes to", "doctor"),
        (java("org.apache.spark.DeltaIOException: [DELTA_CANNOT_CREATE_LOG_PATH] Cannot create file:/proc/t/_log"),
         "A folder that the job writes to", "doctor"),
        (FileNotFoundError(2, "No such file or directory", "/lake/x.avsc"), "A file or folder does not exist.", "path"),
        (java("org.postgresql.util.PSQLException: Connection to 10.0.0.1:5432 refused. Check the name.",
              "java.net.ConnectException: Connection refused"), "Postgres does not answer.", "--database-url"),
        (java("org.postgresql.util.PSQLException: FATAL: terminating connection due to administrator command"),
         "Postgres does not answer.", "--database-url"),
        (java('org.postgresql.util.PSQLException: ERROR: relation "sluice.journal_position" does not exist'),
         "There is no journal in this database.", "--schema"),
        (java('org.postgresql.util.PSQLException: FATAL: password authentication failed for user "me"'),
         "Postgres does not let this user read the journal.", "--database-url"),
        (captured("[FAILED_JDBC.CONNECTION] Failed JDBC on the operation: Couldn't connect to the database",
                  'org.postgresql.util.PSQLException: FATAL: database "no" does not exist'),
         "Postgres does not let this user read the journal.", "--database-url"),
        (java("org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 2.0 failed 1 times",
              "java.lang.RuntimeException: corrupted file: the footer index is not within the file: 4122"),
         "A file of the table is missing or damaged.", "verify"),
        (java("org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 2.0 failed 1 times",
              "org.apache.iceberg.exceptions.NotFoundException: File does not exist: file:/lake/data/1.parquet"),
         "A file of the table is missing or damaged.", "verify"),
        (java("java.lang.IllegalStateException: Cannot call methods on a stopped SparkContext."),
         "Spark has ended while the job ran", "workers"),
        (java("org.apache.spark.SparkException: Job aborted: Master removed our application: FAILED"),
         "The Spark master took the job away", "executors' stderr"),
        (java("org.apache.spark.SparkException: Job aborted: Master removed our application: KILLED"),
         "Spark has ended while the job ran", "workers"),
        (java("java.lang.OutOfMemoryError: Java heap space"), "Spark ran out of memory.", "--memory"),
        (java("org.apache.kafka.common.errors.TimeoutException: Timed out waiting for a node assignment."),
         "The Kafka cluster does not answer.", "--bootstrap"),
        (java("org.apache.spark.api.python.PythonException: Traceback (most recent call last):",
              "cimpl.KafkaException: orders-0, …: not stored within 120 s"),
         "The Kafka cluster does not answer. (Caused by: cimpl.KafkaException: orders-0", "goes on where it was"),
        (java("org.apache.spark.api.python.PythonException: Traceback (most recent call last):",
              'KafkaException: KafkaError{code=MSG_SIZE_TOO_LARGE,val=10,str="Broker: Message size too large"}'),
         "A record is larger than the client or the target topic accepts.", "message.max.bytes"),
        (KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)),
         "The Kafka cluster does not allow this to the job's user.", "Read and Describe"),
        (java("org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 2.0 failed 1 times",
              "org.apache.kafka.common.errors.TopicAuthorizationException: Not authorized to access topics: [orders]"),
         "The Kafka cluster does not allow this to the job's user. (Caused by: org.apache", "Read and Describe"),
        (java("java.lang.IllegalStateException: whatever", "java.lang.RuntimeException: the root of it"),
         "The job ended with an error that it does not know: java.lang.RuntimeException: the root of it", "--trace"),
        (java("java.lang.IllegalStateException: no more than that"),
         "The job ended with an error that it does not know: java.lang.IllegalStateException: no more", "--trace"),
        (ValueError("one line"), "The job ended with an error that it does not know: ValueError: one line", "--trace"),
    ],
)  # fmt: skip
def test_an_error_is_told_in_two_lines(error: Exception, cause: str, step: str) -> None:
    told = explain(error)
    assert told.cause.startswith(cause)
    assert step in told.next_step
    assert "\n" not in told.cause + told.next_step
    assert "\tat " not in told.cause


def test_what_a_job_says_itself_is_told_as_it_is() -> None:
    error = PipelineError("A cause.", "A step.")
    assert explain(error) is error
