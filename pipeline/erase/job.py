"""Remove a key from a topic, its archive and the tables made of it, and write a proof.

The one idea: search first, then change, then read everything again. The topic is changed first, so that no archive job
can restore a value: the job writes a tombstone to each partition, requests compaction and waits for it. Then the
archive is rewritten without the key in one commit. That commit also records the tombstones, which the archive never
takes. Last, the job removes the files in which older versions of the tables still hold the key. If the job is killed in
between, the same command continues it.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from confluent_kafka.admin import ConfigResource, ResourceType
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pipeline import catalog, kafka, session, table
from pipeline.archive import job as archive_job
from pipeline.archive.plan import Progress, Range
from pipeline.erase.proof import Begun, Proof, places, sha256_of, spans
from pipeline.erase.topic import DUE_AT_ONCE, Held, TopicOfKey, still_held
from pipeline.errors import PipelineError
from pipeline.kafka import Cluster
from pipeline.latest import job as latest_job
from pipeline.manifest import job as manifest_job
from pipeline.manifest import signature
from pipeline.manifest.document import Manifest, differences
from pipeline.progress import Progress as Lines
from pipeline.progress import Stop
from pipeline.schema import RESCUED
from pipeline.sql import literal
from pipeline.ticker import Ticker

DIFFERENT = 3
MAX_ERASED = 1_000
"""Number of tombstones that an archive's progress lists before an erasure drops those that their topics no longer have.
Each commit of the archive contains the list.
"""
_SIGNED = "sluice erasure "
_DELETE = "WHEN MATCHED THEN DELETE"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kafka.add_arguments(parser)
    parser.add_argument("--archive", required=True, metavar="TABLE", help="the table that `archive` wrote")
    parser.add_argument("--proof", required=True, type=Path, metavar="FILE", help="the proof, a file of JSON")
    parser.add_argument("--topic", metavar="NAME")
    key = parser.add_mutually_exclusive_group()
    key.add_argument("--key", metavar="TEXT", help="the key to erase, as text in UTF-8")
    key.add_argument("--key-hex", metavar="DIGITS", help="the key to erase, as hexadecimal digits")
    key.add_argument(
        "--check", action="store_true", help="erase nothing; read topic and tables again, and check --proof"
    )
    parser.add_argument("--tables", default="", metavar="A,B", help="tables that `table` made of the archive")
    parser.add_argument(
        "--dead-letters", metavar="TABLE", help="the archive's table of dead letters (default: ARCHIVE_dead_letters)"
    )
    parser.add_argument("--manifest", type=Path, metavar="FILE", help="a manifest of the archive, to be renewed")
    parser.add_argument("--manifest-out", type=Path, metavar="FILE", help="the renewed manifest")
    parser.add_argument("--sign", type=Path, metavar="FILE", help="sign proof and manifest with this Ed25519 key")
    parser.add_argument(
        "--public-key", type=Path, metavar="FILE", help="public key of the proof's signature, for --check"
    )
    parser.add_argument(
        "--wait-seconds",
        type=float,
        default=300.0,
        metavar="S",
        help="longest wait for compaction (default %(default)s)",
    )
    catalog.add_arguments(parser)


def run(arguments: argparse.Namespace, lines: Lines, stop: Stop) -> int:
    cluster = Cluster(arguments.bootstrap, kafka.settings_of(arguments.client_conf, "--client-conf"))
    cluster.existing()
    key = None if arguments.check else key_of(arguments)
    spark = session.open_session(session.options_of(arguments, "sluice erase"), lines)
    try:
        if key is None:
            return check(spark, cluster, arguments, lines, stop)
        Erasure(spark, cluster, arguments, key, lines, stop).run()
    finally:
        spark.stop()
    return 0


def key_of(arguments: argparse.Namespace) -> bytes:
    """Return the key's bytes. Raise PipelineError if options are missing or contradict each other."""
    if not arguments.topic or (arguments.key is None and arguments.key_hex is None):
        raise PipelineError(
            "No topic or no key is named.", "Name a topic with --topic, and a key with --key or --key-hex."
        )
    if (arguments.manifest is None) != (arguments.manifest_out is None):
        raise PipelineError(
            "--manifest and --manifest-out go together.", "Give --manifest and --manifest-out, or neither."
        )
    if arguments.key is not None:
        return arguments.key.encode()
    try:
        return bytes.fromhex(arguments.key_hex)
    except ValueError as error:
        raise PipelineError(f"--key-hex {arguments.key_hex} is not hexadecimal.", "Write it like 00ff1a.") from error


class Erasure:
    """One key of one topic. `run` erases it and writes the proof."""

    def __init__(
        self,
        spark: SparkSession,
        cluster: Cluster,
        arguments: argparse.Namespace,
        key: bytes,
        lines: Lines,
        stop: Stop,
    ) -> None:
        self._spark, self._cluster, self._arguments = spark, cluster, arguments
        self._key, self._lines, self._stop = key, lines, stop
        self._where = table.location(arguments.archive, arguments.format)
        self._tables = _tables(spark, arguments)
        self._part = arguments.proof.with_name(f"{arguments.proof.name}.begun")
        self._progress = self._last_progress()
        topic_id = self._progress.topic_ids[arguments.topic]
        self._topic = TopicOfKey(spark, cluster, arguments.topic, topic_id, sha256_of(key))
        self._claim = Manifest(
            {each: (self._progress.first[each], end) for each, end in self._progress.next.items()},
            self._progress.topic_ids,
            (),
        ).only([arguments.topic])

    def run(self) -> None:
        started = time.monotonic()
        begun = self._begun()
        before = self._checked_manifest(begun)
        gone = self._topic.is_gone()
        with self._ticker():
            found = [] if gone else self._topic.find()
            self._survey(begun, found)
        if gone:
            self._lines.say(f"the topic {self._topic.topic} has gone; the archive holds the rest", event="gone")
        elif any(not each.tombstone for each in found):
            self._check_policy()
        with self._ticker():
            rest_before = self._rest()
            earlier = self._erased_before({each.partition for each in found})
        manifest_job.write(self._part, begun.to_json())
        tombstones = [] if gone else self._empty_topic(found, begun)
        begun.rewrites = True
        manifest_job.write(self._part, begun.to_json())
        self._rewrite(tombstones, earlier)
        with self._ticker():
            rest_after = self._rest()
            changed = list(differences(rest_before, rest_after.days))
        if changed:
            raise PipelineError(
                f"The archive changed during the erasure: {changed[0]}.",
                "Stop the other writer, and run `sluice-pipeline verify` or `verify --manifest`.",
            )
        removed = self._remove_files(begun.files)
        proof = Proof(
            topic=self._topic.topic,
            topic_id=self._topic.topic_id,
            key_sha256=self._topic.key_sha256,
            began=begun.began,
            ended=_now(),
            in_topic=begun.in_topic,
            tombstones=spans((each.partition, each.offset) for each in tombstones),
            topic_is_gone=gone,
            archive=self._arguments.archive,
            in_archive=begun.in_archive,
            tables=begun.tables,
            rest_records=rest_after.records,
            rest_before=rest_before.root,
            rest_after=rest_after.root,
            files=removed,
        )
        proof = self._renew(before, proof)
        if self._arguments.sign is not None:
            proof = replace(proof, signature=signature.sign(self._spark, _signed(proof), self._arguments.sign))
        left = _left(self._spark, self._cluster, self._arguments, proof, self._lines, self._stop)
        if left:
            raise PipelineError(f"The key is still there: {left[0]}.", "Stop its producers; start the command again.")
        manifest_job.write(self._arguments.proof, proof.to_json())
        self._part.unlink()
        self._lines.step(
            f"erased: neither topic nor archive holds a value of the key; {self._arguments.proof} names what went",
            proof.records, time.monotonic() - started, event="erased", files=removed, root=proof.root,
        )  # fmt: skip

    def _last_progress(self) -> Progress:
        """Return the archive's progress. Raise PipelineError if the archive does not contain the topic, or if a batch
        is not complete.
        """
        where, topic = self._where, self._arguments.topic
        progress = archive_job.last_progress(self._spark, where) if table.exists(self._spark, where) else None
        if progress is None or topic not in progress.topic_ids:
            raise PipelineError(f"{where} holds no records of the topic {topic}.", "Check --archive and --topic.")
        letters = self._tables.dead_letters
        if letters is not None:
            last = archive_job.last_progress(self._spark, letters)
            if last is not None and last.batch > progress.batch:
                raise PipelineError(
                    f"An archive job was killed in batch {last.batch} of {where}.",
                    "Let `sluice-pipeline archive --once` complete it, with the options as before; then erase.",
                )
        return progress

    def _checked_manifest(self, begun: Begun) -> Manifest | None:
        """Return the manifest to renew. Raise PipelineError if another key signed it, or if the archive differs from
        it, because a renewed manifest would hide the difference.
        """
        path, sign = self._arguments.manifest, self._arguments.sign
        if path is None:
            return None
        try:
            manifest = Manifest.from_json(path.read_text(), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise PipelineError(f"The manifest cannot be read: {error}.", "Check --manifest.") from error
        if manifest.signature is not None:
            # Ed25519 always yields the same signature for the same text. So the private key shows whether it signed the
            # manifest.
            text = manifest_job.signed_text(manifest)
            if sign is None or signature.sign(self._spark, text, sign) != manifest.signature:
                by = "is signed, but no key is given" if sign is None else f"is not signed with the key of {sign}"
                raise PipelineError(
                    f"{path} {by}, so it cannot be renewed. Nothing was erased.",
                    "Name its key with --sign, or leave --manifest out and make a new manifest afterwards.",
                )
        part = manifest.only([self._arguments.topic])
        if begun.rewrites:
            if begun.compared != part.root:
                raise PipelineError(
                    f"The archive was not compared with {path} before its rows were deleted, so it cannot be renewed.",
                    "Leave --manifest out, and make a new manifest afterwards.",
                )
            return manifest
        changed = manifest_job.compare(self._spark, self._where, part, self._lines, self._stop)
        if changed:
            raise PipelineError(
                f"The archive is not what {path} says: {changed[0]}. Nothing was erased from it.",
                "Run `sluice-pipeline verify`, which names records that differ.",
            )
        begun.compared = part.root
        return manifest

    def _survey(self, begun: Begun, found: Sequence[Held]) -> None:
        """Add to `begun` where the key is, and the files that hold it.

        Raise PipelineError if the key is nowhere, unless an earlier run has already removed it.
        """
        archived, files = self._holding(self._where)
        rows = {name: self._holding(where) for name, where in self._tables.others.items()}
        if not (found or archived or any(held for held, _ in rows.values()) or self._part.exists()):
            raise PipelineError(
                f"No record of the topic {self._topic.topic} has this key, neither in the topic nor in the archive.",
                "Check --topic and --key; keys that are no text are named by --key-hex.",
            )
        values = {(each.partition, each.offset) for each in found if not each.tombstone}
        begun.in_topic = spans(places(begun.in_topic) | values)
        begun.in_archive = spans(places(begun.in_archive) | set(archived))
        begun.tables = {name: max(begun.tables.get(name, 0), len(held)) for name, (held, _) in rows.items()}
        self._lines.say(
            f"found {len(found)} records of the key in the topic, {len(archived)} in the archive", event="found",
            topic=len(found), archive=len(archived),
        )  # fmt: skip
        holding = {self._where: files, **{self._tables.others[name]: held for name, (_, held) in rows.items()}}
        begun.files = {where: sorted(held.union(begun.files.get(where, ()))) for where, held in holding.items()}

    def _begun(self) -> Begun:
        fresh = Begun(self._topic.topic, self._topic.key_sha256, _now())
        if not self._part.exists():
            return fresh
        begun = Begun.from_json(self._part.read_text(), str(self._part))
        if (begun.topic, begun.key_sha256) != (fresh.topic, fresh.key_sha256):
            raise PipelineError(
                f"{self._part} says that the erasure of another key has begun and not ended.",
                "Complete that erasure first, by its own command, or name another --proof.",
            )
        self._lines.say(f"goes on with an erasure that began {begun.began}", event="continue")
        return begun

    def _holding(self, where: str) -> tuple[list[tuple[int, int]], set[str]]:
        """Return partition and offset of the key's rows in a table, and the files that hold them."""
        rows = _of_key(table.with_files(self._spark, where), self._topic.topic, self._topic.key_sha256)
        found = rows.select("partition", "offset", "_file").collect()
        return [(row.partition, row.offset) for row in found], {row["_file"] for row in found}

    def _check_policy(self) -> None:
        """Raise PipelineError if the topic is not compacted, because a tombstone would not remove anything from it."""
        topic = self._topic.topic
        resource = ConfigResource(ResourceType.TOPIC, topic)
        settings = self._cluster.configs([resource])[resource]
        policy = settings.get("cleanup.policy", "")
        if "compact" not in policy:
            raise PipelineError(
                f"The topic {topic} is not compacted (cleanup.policy={policy}), so a tombstone removes nothing. "
                "Nothing was erased.",
                "Add compact to its cleanup.policy if only the newest record of each key must stay. Otherwise wait "
                f"until retention (retention.ms={settings.get('retention.ms')}) or DeleteRecords has removed the key's "
                "records, then start again: the job then erases the archive.",
            )

    def _empty_topic(self, found: Sequence[Held], begun: Begun) -> list[Held]:
        """Remove the key's values from the topic. Return the tombstones that the topic still has."""
        topic = self._topic.topic
        if not begun.settings and any(not each.tombstone for each in found):
            own = self._cluster.own_settings([topic])
            if topic not in own:
                raise PipelineError(f"The settings of {topic} may not be read.", "Allow DescribeConfigs on the topic.")
            settings = {name: own[topic].get(name) for name in DUE_AT_ONCE}
            if settings == DUE_AT_ONCE:
                raise PipelineError(
                    f"The topic {topic} has the settings of another erasure, which has not ended.",
                    "Let that erasure end by its own command. If its proof is lost, set the topic's own values of "
                    f"{', '.join(DUE_AT_ONCE)} (kafka-configs); then start the command again.",
                )
            begun.settings = settings
            manifest_job.write(self._part, begun.to_json())
        try:
            if all(each.tombstone for each in found):
                return list(found)
            self._cluster.set_settings(topic, DUE_AT_ONCE)
            self._lines.say("asks for compaction by the topic's own settings", event="compaction")
            return self._topic.compact(self._key, found, self._arguments.wait_seconds, self._lines, self._stop)
        finally:
            if begun.settings:
                self._cluster.set_settings(topic, begun.settings)

    def _erased_before(self, partitions: Collection[int]) -> tuple[Range, ...]:
        """Return the tombstones of earlier erasures that the archive must still leave out. If there are many, return
        only those that their topics still have. Raise PipelineError if there is then no room for those of `partitions`.
        """
        erased = self._progress.erased
        if len(erased) + len(partitions) <= MAX_ERASED:
            return erased
        kept = tuple(still_held(self._spark, self._cluster, erased, self._progress.topic_ids))
        if len(kept) + len(partitions) > MAX_ERASED:
            raise PipelineError(
                f"The archive lists at most {MAX_ERASED:,} tombstones of erased keys, and its topics still hold "
                f"{len(kept):,} tombstones of its list. Nothing was erased.",
                "Start again when delete.retention.ms has passed and compaction has removed them.",
            )
        return kept

    def _rewrite(self, tombstones: Sequence[Held], earlier: Sequence[Range]) -> None:
        """Delete the key's rows from all tables. The archive's commit also lists the tombstones that the archive leaves
        out.
        """
        spark, topic, before = self._spark, self._topic.topic, self._progress
        erased = tuple(Range(topic, each.partition, each.offset, each.offset + 1) for each in tombstones)
        fresh = tuple(each for each in erased if each not in earlier)
        after = replace(before, batch=before.batch + 1, run=uuid.uuid4().hex, erased=(*earlier, *fresh))
        key = spark.createDataFrame([(topic, bytearray(self._key))], "topic string, key binary")
        on = f"old.topic = {literal(topic)} AND old.topic = new.topic AND old.key = new.key"
        self._lines.say(f"rewrites {self._where} without the key", event="rewrites")
        with self._ticker():
            table.merge(key, self._where, on, _DELETE, archive_job.APPLICATION, after.batch, after.to_json())
            if archive_job.last_progress(spark, self._where) != after:
                raise PipelineError(f"Another job writes to {self._where}.", "Stop it, and start the command again.")
            for where in self._tables.others.values():
                application, number, told = archive_job.APPLICATION, after.batch, after.to_json()
                if where != self._tables.dead_letters:
                    merged = latest_job.last_merged(spark, where)
                    if merged is None:
                        raise PipelineError(f"{where} is no table that `table` made.", "Check --tables.")
                    merged = replace(merged, batch=merged.batch + 1, run=uuid.uuid4().hex)
                    application, number, told = latest_job.APPLICATION, merged.batch, merged.to_json()
                table.merge(key, where, on, _DELETE, application, number, told)

    def _remove_files(self, files: Mapping[str, Sequence[str]]) -> int:
        """Remove the files that only older versions of the tables use. Raise PipelineError if a file with the key still
        exists.
        """
        removed = 0
        for where, held in files.items():
            since = time.time()
            with self._ticker():
                removed += table.vacuum(self._spark, where, (time.time() - since) / 3600)
            for file in held:
                if table.holds_file(self._spark, where, file):
                    raise PipelineError(
                        f"{file}, which holds the key, is still there: a tag, a branch or a deletion vector of {where} "
                        "keeps it.",
                        "Drop the tag or branch; set delta.enableDeletionVectors to false and run REORG TABLE … APPLY "
                        "(PURGE), or write.merge.mode to copy-on-write. Then start the command again.",
                    )
        self._lines.say(f"removed {removed:,} files of older versions", event="files", removed=removed)
        return removed

    def _rest(self) -> Manifest:
        """Return the hashes of all other records of the topic in the archive."""
        records = table.read(self._spark, self._where)
        records = records.where(~F.sha2("key", 256).eqNullSafe(self._topic.key_sha256))
        days = manifest_job.days(self._spark, records, self._claim, self._lines, self._stop)
        return dataclasses.replace(self._claim, days=days)

    def _renew(self, before: Manifest | None, proof: Proof) -> Proof:
        """Write the renewed manifest: this topic's days as they are now, and the days of other topics unchanged."""
        if before is None:
            return proof
        records = table.read(self._spark, self._where)
        part = before.only([self._topic.topic])
        with self._ticker():
            days = manifest_job.days(self._spark, records, part, self._lines, self._stop)
        others = [day for day in before.days if day.topic != self._topic.topic]
        whole = sorted([*others, *days], key=lambda day: (day.topic, day.partition, day.day))
        after = dataclasses.replace(before, days=tuple(whole), signature=None)
        if self._arguments.sign is not None:
            signed = signature.sign(self._spark, manifest_job.signed_text(after), self._arguments.sign)
            after = dataclasses.replace(after, signature=signed)
        manifest_job.write(self._arguments.manifest_out, after.to_json())
        self._lines.say(f"{self._arguments.manifest_out} has the root {after.root}", event="manifest", root=after.root)
        return replace(proof, manifest_before=before.root, manifest_after=after.root)

    def _ticker(self) -> Ticker:
        return Ticker(self._spark, self._lines, self._stop, "it goes on")


def check(spark: SparkSession, cluster: Cluster, arguments: argparse.Namespace, lines: Lines, stop: Stop) -> int:
    """Check a proof: read topic, archive and tables again. Return 0, or 3 if the key is in one of them."""
    try:
        proof = Proof.from_json(arguments.proof.read_text(), str(arguments.proof))
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"The proof cannot be read: {error}.", "Check --proof.") from error
    if arguments.public_key is None:
        lines.say("the proof's signature is not checked; name its key with --public-key", event="unsigned")
    elif proof.signature is None or not signature.is_signed(
        spark, _signed(proof), proof.signature, arguments.public_key
    ):
        raise PipelineError(
            f"{arguments.proof} is not signed with the key of {arguments.public_key}.",
            "Check both files, or use an unchanged copy of the proof.",
        )
    left = _left(spark, cluster, arguments, proof, lines, stop)
    for words in left:
        lines.say(f"HOLDS {words}", event="left")
    if left:
        return DIFFERENT
    lines.say(
        f"proved: neither {proof.topic} nor {proof.archive} holds a value of the key", event="proved",
        records=proof.records,
    )  # fmt: skip
    return 0


@dataclasses.dataclass(frozen=True, slots=True)
class _Tables:
    others: dict[str, str]
    """Locations of tables beside the archive that may hold the key, by name."""
    dead_letters: str | None


def _tables(spark: SparkSession, arguments: argparse.Namespace) -> _Tables:
    """Return the tables of --tables, and the dead letters if the archive has any. Raise PipelineError if a table does
    not exist.
    """
    named = {name: table.location(name, arguments.format) for name in arguments.tables.split(",") if name}
    for name, where in named.items():
        if not table.exists(spark, where):
            raise PipelineError(f"There is no table {name}.", "Check --tables.")
    letters = arguments.dead_letters or f"{arguments.archive.rstrip('/')}_dead_letters"
    where = table.location(letters, arguments.format)
    if table.exists(spark, where):
        return _Tables({**named, letters: where}, where)
    archive = table.location(arguments.archive, arguments.format)
    # A proof names the table itself, so --check needs no option for it.
    if arguments.dead_letters or (not arguments.check and _has_dead_letters(spark, archive)):
        raise PipelineError(
            f"There is no table of dead letters at {letters}, which may hold the key.",
            "Name it with --dead-letters. If it was removed, the next run of a typed `archive` makes an empty one.",
        )
    return _Tables(named, None)


def _has_dead_letters(spark: SparkSession, archive: str) -> bool:
    """Return whether `archive` has made a table of dead letters: for typed values, or for records that it skipped."""
    if not table.exists(spark, archive):
        return False
    progress = archive_job.last_progress(spark, archive)
    return RESCUED in table.schema(spark, archive).names or (progress is not None and bool(progress.skipped))


def _of_key(rows: DataFrame, topic: str, key_sha256: str) -> DataFrame:
    return rows.where((F.col("topic") == topic) & (F.sha2("key", 256) == key_sha256))


def _left(
    spark: SparkSession, cluster: Cluster, arguments: argparse.Namespace, proof: Proof, lines: Lines, stop: Stop
) -> list[str]:
    """Return a text that says where the key still is. A tombstone in the topic is reported, but it holds no value."""
    found: list[str] = []
    topic = TopicOfKey(spark, cluster, proof.topic, proof.topic_id, proof.key_sha256)
    with Ticker(spark, lines, stop):
        if topic.is_gone():
            lines.say(f"the topic {proof.topic} has gone, so it holds nothing", event="gone")
        else:
            held = topic.find()
            found += [f"{proof.topic}-{each.partition} offset {each.offset:,}" for each in held if not each.tombstone]
            stones = [f"{proof.topic}-{each.partition} offset {each.offset:,}" for each in held if each.tombstone]
            if stones:
                lines.say(
                    f"the topic holds the key, without a value, in tombstones until delete.retention.ms has passed: "
                    f"{', '.join(stones)}",
                    event="tombstones", tombstones=len(stones),
                )  # fmt: skip
        names = [arguments.archive, *proof.tables, *_tables(spark, arguments).others]
        for name in dict.fromkeys(names):
            where = table.location(name, arguments.format)
            rows = _of_key(table.read(spark, where), proof.topic, proof.key_sha256)
            found += [
                f"{name}: {proof.topic}-{row.partition} offset {row.offset:,}"
                for row in rows.select("partition", "offset").collect()
            ]
    return found


def _signed(proof: Proof) -> bytes:
    return (_SIGNED + proof.root).encode()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    from pipeline.cli import main

    sys.exit(main(["erase", *sys.argv[1:]]))
