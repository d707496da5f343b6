"""A manifest proves an archive's contents after the topic is gone. If the archive was changed, the manifest locates the
change down to a block.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pipeline import catalog
from pipeline.archive import job as archive_job
from pipeline.errors import PipelineError
from pipeline.manifest import merkle
from pipeline.manifest.document import Block, Day, Manifest, differences
from pipeline.progress import Progress, Stop
from pipeline.verify import job as verify_job
from pipeline.verify.sums import BLOCK, headers_text
from tests.gateway_process import GatewayProcess
from tests.pipeline import jobs, topics
from tests.pipeline.jobs import Record
from tests.pipeline.keys import ed25519_keys

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("interpreted")]


@pytest.fixture
def out(tmp_path: Path) -> str:
    return str(tmp_path / "table")


def hash_of(records: list[tuple[int, Record]]) -> str:
    """Return a block's hash, computed from the records that a client reads, as docs/pipeline.md describes it."""
    text = ""
    for offset, (_, key, value, time_ms, headers) in records:
        lengths = " ".join("-" if each is None else str(len(each)) for each in (key, value))
        head = f"{offset} {time_ms} create_time {lengths}\n"
        content = head.encode() + (key or b"") + (value or b"") + headers_text(headers).encode()
        text += hashlib.sha256(content).hexdigest()
    return hashlib.sha256(text.encode()).hexdigest()


def test_an_archive_and_its_copy_in_another_format_are_proved_without_the_topic(
    spark: SparkSession, gateway: GatewayProcess, out: str, tmp_path: Path
) -> None:
    topic = topics.fresh(gateway.bootstrap, 2)
    topics.fill(gateway.bootstrap, topic, topics.records(120, 2))
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic, "--max-batch-records", "50")
    lake = ("--format", "iceberg", "--catalog", str(tmp_path / "lake"))
    session = spark.newSession()
    for name, value in catalog.settings_of(jobs.parse(archive_job, ["--bootstrap", "x", "--out", "x", *lake])).items():
        session.conf.set(name, value)
    jobs.archive(session, gateway.bootstrap, "events", "--topics", topic, *lake)
    private, public = ed25519_keys(tmp_path, "ours")
    _, another = ed25519_keys(tmp_path, "theirs")
    file = tmp_path / "manifest.json"
    jobs.manifest(spark, out, str(file), "--key", private)

    manifest = Manifest.from_json(file.read_text(), "manifest")
    assert manifest.records == 120
    assert dict(manifest.claim) == {(topic, 0): (0, 60), (topic, 1): (0, 60)}
    for day in manifest.days:
        read = topics.read(gateway.bootstrap, topic, day.partition, 60)
        mine = [each for each in read if day.first <= each[0] <= day.last]
        assert day.blocks == (Block(0, len(mine), hash_of(mine)),)

    topics.fill(gateway.bootstrap, topic, topics.records(20, 2))
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    topics.delete(gateway.bootstrap, topic)
    assert jobs.verify_by_manifest(spark, out, str(file), "--public-key", public).code == 0
    assert jobs.verify_by_manifest(session, "events", str(file), *lake).events("proved")[0]["records"] == 120
    with pytest.raises(PipelineError, match="is not signed with the key"):
        jobs.verify_by_manifest(spark, out, str(file), "--public-key", another)
    with pytest.raises(PipelineError, match="does not hold a public key"):
        jobs.verify_by_manifest(spark, out, str(file), "--public-key", private)

    spark.sql(f"UPDATE delta.`{out}` SET headers = NULL WHERE partition = 1 AND offset = 4").collect()
    spark.sql(f"DELETE FROM delta.`{out}` WHERE partition = 0 AND offset = 7").collect()
    proof = jobs.verify_by_manifest(spark, out, str(file))
    assert proof.code == 3
    assert [line["say"].partition("within")[2] for line in proof.events("difference")] == [
        " offsets 0 to 4,095: the archive holds 59 records instead of 60",
        " offsets 0 to 4,095: the archive holds other records",
    ]


def a_manifest(**changes: Any) -> Manifest:
    days = (
        Day("a", 0, "2026-01-31", 5, BLOCK, (Block(0, 10, "h0"), Block(1, 1, "h1"))),
        Day("a", 0, "2026-02-01", BLOCK + 1, BLOCK + 2, (Block(1, 2, "h2"),)),
        Day("b", 3, "2026-01-31", 0, 0, (Block(0, 1, "h3"),)),
    )
    values: dict[str, Any] = {
        "claim": {("a", 0): (5, BLOCK + 3), ("b", 3): (0, 1)}, "topic_ids": {"a": "i", "b": "j"}, "days": days,
    }  # fmt: skip
    return Manifest(**{**values, **changes})


def test_a_manifest_that_is_changed_anywhere_is_refused() -> None:
    text = a_manifest().to_json()
    assert Manifest.from_json(text, "m") == a_manifest()
    told = json.loads(text)

    def changed(change: Any) -> str:
        copy = json.loads(text)
        change(copy)
        return json.dumps(copy)

    changes = [
        lambda each: each.update(root=merkle.EMPTY),
        lambda each: each["topics"]["a"].update(id="other"),
        lambda each: each["topics"]["b"]["partitions"].update({"3": [0, 2]}),
        lambda each: each["days"].pop(),
        lambda each: each["days"].reverse(),
        lambda each: each["days"][0]["blocks"][1].__setitem__(2, "h9"),
        lambda each: each["days"][0]["blocks"].pop(),
        lambda each: each["days"][0].update(records=12),
        lambda each: each["days"][0].update(last=BLOCK + 1),
    ]
    assert [changed(lambda each: None)] == [json.dumps(told)]
    for change in changes:
        with pytest.raises(PipelineError, match="m has been changed"):
            Manifest.from_json(changed(change), "m")
    for text, words in (
        ("[]", "no manifest"),
        ("{", "no manifest"),
        (changed(lambda each: each.update(block_offsets=1)), "another version"),
    ):
        with pytest.raises(PipelineError, match=words):
            Manifest.from_json(text, "m")


def test_differences_name_the_day_and_the_block() -> None:
    manifest = a_manifest()
    assert list(differences(manifest, manifest.days)) == []
    first, second, third = manifest.days
    other = Day("a", 0, "2026-01-31", 5, BLOCK, (Block(0, 10, "x"), Block(2, 4, "y")))
    assert [words.partition(": ")[0] for words in differences(manifest, [other, second])] == [
        "a-0 of 2026-01-31, within offsets 0 to 4,095",
        "a-0 of 2026-01-31, within offsets 4,096 to 8,191",
        "a-0 of 2026-01-31, within offsets 8,192 to 12,287",
        "b-3 of 2026-01-31, within offsets 0 to 4,095",
    ]
    part = manifest.only(["b"])
    assert (part.days, list(part.claim)) == ((third,), [("b", 3)])
    assert first.records == 11


def test_a_root_depends_on_every_leaf_and_its_place() -> None:
    leaves = [b"%d" % number for number in range(5)]
    whole = merkle.root(leaves)
    assert len({whole, merkle.root(leaves[:4]), merkle.root(leaves[::-1]), merkle.root([*leaves, leaves[-1]])}) == 4
    pair = merkle.leaf(b"0") + merkle.leaf(b"1")
    # The content of an inner node of the hash tree is not accepted as a leaf.
    assert merkle.root([b"0", b"1"]) == hashlib.sha256(b"\x01" + pair).hexdigest() != merkle.root([pair])
    assert merkle.root([]) == merkle.EMPTY


@pytest.mark.parametrize("given", [[], ["--bootstrap", "localhost:1", "--manifest", "m"]])
def test_an_archive_is_compared_with_its_topics_or_with_a_manifest(given: list[str]) -> None:
    arguments = jobs.parse(verify_job, ["--archive", "a", *given])
    with pytest.raises(PipelineError, match="either with its topics or with a manifest"):
        verify_job.run(arguments, Progress("verify"), Stop())
