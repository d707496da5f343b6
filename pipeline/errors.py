"""Explain why a job cannot continue: the cause, and the next step.

The one idea: a job raises `PipelineError` for the failures that it expects. For every other error, `explain` searches
the JVM's long trace for the line that names the cause. The trace itself is printed only with --trace.
"""

from __future__ import annotations

import re

MAX_CAUSE_CHARACTERS = 400


class PipelineError(Exception):
    """A job cannot continue. `cause` gives the reason, and `next_step` says what the user can do.
    Both are sentences.
    """

    def __init__(self, cause: str, next_step: str) -> None:
        super().__init__(f"{cause} {next_step}")
        self.cause, self.next_step = cause, next_step


LOST_FILE = "A file of the table is missing or damaged."
_KNOWN: tuple[tuple[str, str, str], ...] = (
    (
        r"ForeignWriterError: ",
        "Another client writes to a target partition, so the replay cannot tell which records are its own.",
        "Replay under another --name into a topic to which no other client produces.",
    ),
    (
        r"No space left on device|Disk quota exceeded",
        "There is no space left where the job writes.",
        "Free some, or name another folder; then start the job again: it continues behind its last commit.",
    ),
    (
        r"(?:TOPIC|GROUP|CLUSTER|TRANSACTIONAL_ID)_AUTHORIZATION_FAILED|"
        r"(?:Topic|Group|Cluster|TransactionalId)AuthorizationException",
        "The Kafka cluster does not allow this to the job's user.",
        "Allow it by ACLs (a job that reads needs Read and Describe on its topics), or name another user with "
        "--client-conf and --kafka-conf.",
    ),
    (
        r"Permission denied|AccessControlException|EACCES|AccessDenied",
        "A file or folder may not be read or written by this user.",
        "Give the user access, or name another place; `sluice-pipeline doctor --table PATH` tries to write there.",
    ),
    (
        r"NotADirectory|Not a directory|ParentNotDirectory|not a directory|Mkdirs failed|FileExistsError|"
        r"DELTA_CANNOT_CREATE_LOG_PATH",
        "A folder that the job writes to cannot be created.",
        "Name another; `sluice-pipeline doctor --table PATH` tries to write there.",
    ),
    (
        r"FileNotFoundError: ",
        "A file or folder does not exist.",
        "Check its path.",
    ),
    (
        r'relation "[^"]*journal_\w+" does not exist',
        "There is no journal in this database.",
        "Check --database-url and --schema.",
    ),
    (
        r"password authentication failed|no pg_hba\.conf entry|no password was provided|role \"[^\"]*\" does not exist|"
        r"database \"[^\"]*\" does not exist|permission denied for (?:table|schema|relation)",
        "Postgres does not let this user read the journal.",
        "Check user, password and database in --database-url; the user needs the right to select from the schema.",
    ),
    (
        r"PSQLException: (?:Connection to|The connection attempt failed|An I/O error|This connection has been closed|"
        r"FATAL: (?:terminating connection|the database system is))|ConnectionDoesNotExistError|AdminShutdownError",
        "Postgres does not answer.",
        "Check --database-url, and that the server runs; then start the job again from the beginning.",
    ),
    (
        r"UnknownTopicOrPartition|does not host this topic-partition",
        "A topic or partition does not exist, or has been deleted.",
        "Check its name with a listing of topics, or leave it out of --topics.",
    ),
    (
        r"Failed to (?:create|construct) (?:new )?Kafka\w+|TimeoutException: .*(?:topic metadata|Call\(callName)|"
        r"Timeout of \d+ms expired|Timed out waiting for a node|_TRANSPORT|_ALL_BROKERS_DOWN|_TIMED_OUT|"
        r"Connection to node .* could not be established|: not stored within \d+ s|cannot be read within \d+ s",
        "The Kafka cluster does not answer.",
        "Check --bootstrap, and that the cluster runs; then start the job again: it goes on where it was.",
    ),
    (
        r"MSG_SIZE_TOO_LARGE",
        "A record is larger than the client or the target topic accepts.",
        "Raise both: --client-conf message.max.bytes=N, and max.message.bytes=N of the target topic.",
    ),
    (
        r"ClassNotFoundException|NoClassDefFoundError|DATA_SOURCE_NOT_FOUND",
        "A jar that the job needs is missing.",
        "Run `sluice-pipeline jars`, or name their folder with --jars; spark-submit takes them by its own --jars.",
    ),
    (
        r"JAVA_GATEWAY_EXITED",
        "Spark's JVM did not start; its own message is above.",
        "Check JAVA_HOME, JAVA_TOOL_OPTIONS, --memory and --conf; `sluice-pipeline doctor` tries to start one.",
    ),
    (
        r"Py4JNetworkError|Answer from Java side is empty|Connection refused.*py4j",
        "Spark's JVM has ended; the system may have killed it for its memory.",
        "Look at the system's log, give Spark less with --memory, and start the job again: it goes on where it was.",
    ),
    (
        r"OutOfMemoryError|GC overhead limit",
        "Spark ran out of memory.",
        "Give Spark more with --memory, or make batches smaller with --max-batch-records.",
    ),
    (
        r"Master removed our application: FAILED",
        "The Spark master took the job away, because its executors ended again and again.",
        "Look at the workers' logs and their executors' stderr; then start the job again: it goes on where it was.",
    ),
    (
        r"All masters are unresponsive|Could not connect to spark://|Failed to connect to master",
        "The Spark master does not answer.",
        "Check --master, and that the master and at least one worker run.",
    ),
    (
        r"Master removed our application|stopped SparkContext|SparkContext (?:has been|was) (?:shut down|stopped)",
        "Spark has ended while the job ran: its master took the job away, or does not answer.",
        "Look at the logs of master and workers; then start the job again: it goes on where it was.",
    ),
    (
        r"DELTA_(?:CONCURRENT|PROTOCOL_CHANGED|METADATA_CHANGED)\w*|Concurrent(?:Append|Delete\w*|Transaction|Write)Exception|"
        r"CommitFailedException|is not an ancestor of|Found (?:new )?conflicting ",
        "Another writer changed the table at the same moment.",
        "Start the job again; if it happens each time, stop the other writer.",
    ),
    (
        r"DELTA_FAILED_READ_FILE|FAILED_READ_FILE|FileNotFoundException|CANNOT_READ_FILE|NotFoundException: File|"
        # Iceberg's reader forwards the error messages of Parquet.
        r"is not a Parquet file|corrupted file: the footer|can not read class org\.apache\.parquet|"
        r"ParquetDecodingException",
        LOST_FILE,
        "Run `sluice-pipeline verify`, which names the lost offsets. A vacuum during a long read also removes files.",
    ),
)


def explain(error: BaseException) -> PipelineError:
    """Return the cause and the next step of any error that ended a job."""
    if isinstance(error, PipelineError):
        return error
    text = _told(error)
    for pattern, cause, next_step in _KNOWN:
        found = re.search(pattern, text)
        if found:
            return PipelineError(f"{cause} ({_line_around(text, found.start())})", next_step)
    return PipelineError(
        f"The job ended with an error that it does not know: {root_cause(error)}",
        "Start the job again with --trace to see the whole error.",
    )


def _told(error: BaseException) -> str:
    """Return the text of an error and its causes, without stack frames. Spark does not put the
    causes into its message.
    """
    text = f"{type(error).__name__}: {error}\n{getattr(error, '_stackTrace', '')}"
    return "\n".join(line for line in text.splitlines() if not line.startswith("\tat "))


def _line_around(text: str, position: int) -> str:
    start = text.rfind("\n", 0, position) + 1
    end = text.find("\n", position)
    return text[start : len(text) if end < 0 else end].strip()[:MAX_CAUSE_CHARACTERS]


def root_cause(error: BaseException) -> str:
    """Return the error that a Python worker raised, else the last cause in a trace, else its first line."""
    text = _told(error)
    if "thrown from the Python worker" in text:
        raised = re.findall(r"^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt): .*$", text, re.MULTILINE)
        if raised:
            return raised[-1][:MAX_CAUSE_CHARACTERS]
    # The first line of a Py4J error only names the call; the error follows.
    causes = re.findall(r"^(?:Caused by|): (.*)$", text, re.MULTILINE)
    return (causes[-1] if causes else text.strip().splitlines()[0])[:MAX_CAUSE_CHARACTERS]
