"""Test the checker itself: put defects into copies of the product, and check that it finds each defect.

`python -m tests.trust.mutants [--only NAME …] [--seconds 20] [--attempts 4] [--clients KIND …]`

The one idea: a mutant is a text edit in a copy of the sources, so the product has no switch for it. If the sources no
longer contain the text of a mutant, that is an error. Each mutant names the faults that expose it, because a short run
with all faults may miss the one that matters. The seed still chooses their order, length and target.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.gateway_process import ROOT
from tests.trust.members import ALL_KINDS, JAVA, LIBRDKAFKA
from tests.trust.run import Verdict, run
from tests.trust.world import Store

READ_S = 30.0
"""How long a group may make no progress after the faults. Then the checker judges what the group has read."""
PACKAGES = ("gateway", "protocol", "sluice", "storage")
HARMLESS = ("reset_clients", "delay_clients")
"""Faults for mutants that show without any. These faults make clients repeat requests, so that every code path runs."""


class MutantError(Exception):
    """A mutant cannot be made, because the sources have changed."""


@dataclass(frozen=True)
class Edit:
    """Replace each occurrence of `old` in one file with `new`."""

    path: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    name: str
    edits: Sequence[Edit]
    found_by: Sequence[str]
    """Promises that this defect itself breaks. If a run breaks other promises only, the checker has missed the defect.
    """
    faults: Sequence[str] = HARMLESS
    store: Store = Store.POSTGRES
    kinds: Sequence[str] = (LIBRDKAFKA,)
    """Kinds of clients that are needed to show the defect."""
    postgres: Mapping[str, str] | None = None
    """Settings of Postgres that cause the defect."""

    def broken(self, verdict: Verdict) -> list[str]:
        """Return the promises of `found_by` that the verdict names as broken."""
        return [name for name in self.found_by if verdict.violations.get(name)]


MUTANTS: Sequence[Mutant] = (
    Mutant(
        "the sequence of an idempotent producer is ignored",
        [
            Edit(
                "storage/functions/log.sql",
                "        if s > 0 then\n            last_sequence",
                "        if s > 0 and p_transactional[i] then\n            last_sequence",
            )
        ],
        ("nothing is there twice",),
    ),
    Mutant(
        "one in fifty appends is forgotten",
        [
            Edit(
                "storage/functions/log.sql",
                "append_chunks.inline_slot, false\n    from generate_series(1, chunk_total) i;",
                "append_chunks.inline_slot, false\n    from generate_series(1, chunk_total) i where random() > 0.02;",
            ),
            Edit(
                "storage/functions/log.sql",
                "        where bases[k] is not null\n    )",
                "        where bases[k] is not null and random() > 0.02\n    )",
            ),
        ],
        ("nothing acknowledged is lost",),
    ),
    Mutant(
        "an append leaves a gap of one offset",
        [
            Edit(
                "storage/functions/log.sql",
                "bases[k] + p_chunks[k][2] - 1,",
                "bases[k] + p_chunks[k][2] - 1 + (random() < 0.05)::integer,",
            )
        ],
        ("offsets are dense", "every partition can be read to its end"),
    ),
    Mutant(
        "a read of the tail skips a batch",
        [
            Edit(
                "gateway/log/tail.py",
                "for index in range(bisect_left(entries, offset, lo=first, key=_last_offset), len(entries)):",
                "for index in range(bisect_left(entries, offset, lo=first, key=_last_offset)"
                " + (offset % 97 == 5), len(entries)):",
            )
        ],
        (
            "groups read everything",
            "offsets are dense",
        ),
    ),
    Mutant(
        "two appends have one place in a segment",
        [
            Edit(
                "storage/segments.py",
                "self.end += size_bytes\n",
                "self.end += size_bytes * (position == 0 or position % 3 > 0)\n",
            )
        ],
        ("nothing acknowledged is lost", "a restart keeps the log"),
        store=Store.SEGMENTS,
    ),
    Mutant(
        "an append is acknowledged before it is on disk",
        [
            Edit("storage/pool.py", '    "jit": "off",\n', '    "jit": "off",\n    "synchronous_commit": "off",\n'),
            Edit(
                "storage/queries/pool.sql",
                "where current_setting('synchronous_commit') = 'off'",
                "where current_setting('synchronous_commit') = 'never'",
            ),
        ],
        ("nothing acknowledged is lost",),
        ("kill_postgres",),
    ),
    Mutant(
        "the last stable offset is the high watermark",
        [
            Edit(
                "storage/functions/log.sql",
                "last_stable_offset := greatest(coalesce(last_stable_offset, high_watermark), log_start_offset);",
                "last_stable_offset := high_watermark;",
            ),
            Edit(
                "gateway/log/tail.py",
                "end_offset = min(known.last_stable_offset, partition.held_stable_offset)",
                "end_offset = known.high_watermark",
            ),
            Edit(
                "gateway/log/tail.py",
                "            if offset >= known.last_stable_offset:\n",
                "            if offset >= known.high_watermark:\n",
            ),
        ],
        (
            "groups read what the log holds",
            "transfers happen once",
        ),
        ("kill_a_node", "reset_clients", "cut_clients_off"),
    ),
    Mutant(
        "an aborted transaction is forgotten",
        [
            Edit(
                "storage/functions/transactions.sql",
                "where not p_committed and m.first_offset is not null\n",
                "where not p_committed and m.first_offset is not null and false\n",
            )
        ],
        ("transfers happen once",),
        ("kill_a_node", "kill_all_nodes", "reset_clients", "cut_clients_off"),
    ),
    Mutant(
        "the offsets of an aborted transaction are committed",
        [
            Edit(
                "storage/functions/transactions.sql",
                "begin\n    if p_committed then\n        -- An offset that was committed later",
                "begin\n    if true then\n        -- An offset that was committed later",
            )
        ],
        ("transfers happen once",),
        ("kill_a_node", "reset_clients", "cut_clients_off"),
    ),
    Mutant(
        "a commit stores the offset before",
        [
            Edit(
                "storage/functions/groups.sql",
                "        committed_offset    = excluded.committed_offset,\n",
                "        committed_offset    = greatest(excluded.committed_offset - 1, 0),\n",
            )
        ],
        ("numbers never fall",),
    ),
    Mutant(
        "a partition is given to its new owner too early",
        [
            Edit(
                "gateway/coordinator/consumer/current_assignment.py",
                "    if owned is None or meet(owned, revoke):\n        return False\n",
                "    if owned is None or meet(owned, revoke):\n        return True\n",
            )
        ],
        ("owners never overlap",),
    ),
    Mutant(
        "compaction drops the newest record of a key",
        [
            Edit(
                "gateway/log/compactor.py",
                "index.newest(record.key) > record.offset",
                "index.newest(record.key) >= record.offset",
            )
        ],
        ("compaction keeps the last",),
    ),
    Mutant(
        "the statement of a lost connection may still run",
        [Edit("storage/pool.py", "        if self._lost.any:\n", "        if self._lost.any and False:\n")],
        (
            "nothing is there twice",
            "numbers never fall",
        ),
        ("deliver_statements_late",),
    ),
    Mutant(
        "a share group forgets what was accepted when its node ends",
        [
            Edit(
                "gateway/share/partitions.py",
                "Range(offset, offset + length - 1, RecordState(state), delivery_count)",
                "Range(offset, offset + length - 1, RecordState.AVAILABLE, delivery_count)",
            ),
            Edit("gateway/share/partitions.py", "SharePartition(row.start_offset, ", "SharePartition(0, "),
            Edit("gateway/share/partitions.py", "    offset = row.start_offset\n", "    offset = 0\n"),
        ],
        ("settled records stay settled",),
        ("kill_a_node",),
        kinds=(LIBRDKAFKA, JAVA),
    ),
    Mutant(
        "a node that does not lead a partition serves another one",
        [
            Edit(
                "gateway/apis/data/fetch.py",
                "        part.partition = topic.partitions[asked.partition]\n",
                "        part.partition = topic.partitions[asked.partition]\n"
                "        if not self._context.services.membership.leads(part.partition):\n"
                "            part.partition = topic.partitions[0]\n",
            )
        ],
        # Stock clients ask the leader.
        ("every node returns the whole log",),
    ),
    Mutant(
        "a committed offset is sometimes not found",
        [
            Edit(
                "storage/queries/offsets.sql",
                "and c.partition_index = wanted.partition_index\n",
                "and c.partition_index = wanted.partition_index and random() > 0.01\n",
            )
        ],
        ("numbers never fall",),
    ),
    Mutant(
        "a share group forgets how often it has delivered a record when its node ends",
        [
            Edit(
                "gateway/share/partitions.py",
                "Range(offset, offset + length - 1, RecordState(state), delivery_count)",
                "Range(offset, offset + length - 1, RecordState(state), 0)",
            )
        ],
        ("deliveries keep their limit",),
        ("kill_a_node",),
        kinds=(LIBRDKAFKA, JAVA),
    ),
    Mutant(
        "a released record is delivered without a limit",
        [
            Edit(
                "gateway/coordinator/share/partition.py",
                "    if each.delivery_count < settings.delivery_count_limit:\n",
                "    if each.delivery_count < settings.delivery_count_limit + 1:\n",
            )
        ],
        ("deliveries keep their limit",),
        kinds=(LIBRDKAFKA, JAVA),
    ),
    Mutant(
        "records of SQL transactions stay staged after they were appended",
        [
            Edit(
                "storage/queries/sql_door.sql",
                "from take_staged($1, $2, $3)\ncross join append_chunks(",
                "from (select case when random() < 0.95 then take_staged($1, $2, $3) end) taken\n"
                "cross join append_chunks(",
            )
        ],
        # A relay reads a part of the log again only after a restart, and all nodes restart at the end.
        ("records of SQL are the committed rows", "a restart keeps the log"),
    ),
    Mutant(
        "an offset that SQL commits is the one before",
        [
            Edit(
                "storage/sql_door/30_offsets.sql",
                '        commit_offset."offset", coalesce(',
                '        greatest(commit_offset."offset" - 1, 0), coalesce(',
            )
        ],
        ("SQL consumers process once",),
        ("kill_postgres",),
    ),
    Mutant(
        "an object that the bucket refused counts as stored",
        [
            Edit(
                "storage/mover.py",
                '            await self._pool.fetch_value(statement("seal_object"), object_id, size_bytes)\n'
                "            return 0\n        _, moved_bytes = await self._name(copied, object_id, 0",
                "        _, moved_bytes = await self._name(copied, object_id, 0",
            )
        ],
        ("nothing acknowledged is lost", "every partition can be read to its end", "groups read everything"),
        ("disturb_the_bucket",),
        store=Store.BUCKET,
    ),
    Mutant(
        "Postgres does not sync",
        [],
        # Postgres may have lost so much that the nodes refuse the database.
        ("nothing acknowledged is lost", "every node starts again and answers"),
        ("cut_power",),
        postgres={"fsync": "off"},
    ),
    Mutant(
        "a segment is not synced",
        [Edit("storage/segments.py", "        os.fdatasync(self._fd)\n", "")],
        ("nothing acknowledged is lost",),
        ("cut_power",),
        store=Store.SEGMENTS,
    ),
)


@contextmanager
def mutated(mutant: Mutant) -> Iterator[Path]:
    """Provide a directory with the sources of the mutant. Raise MutantError if an edit finds nothing to replace."""
    with tempfile.TemporaryDirectory(prefix="sluice-mutant-") as name:
        root = Path(name)
        root.chmod(0o755)
        for package in PACKAGES:
            shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
        for edit in mutant.edits:
            path = root / edit.path
            text = path.read_text()
            if edit.old not in text:
                raise MutantError(f"{mutant.name}: {edit.path} does not contain {edit.old!r}")
            path.write_text(text.replace(edit.old, edit.new))
        yield root


def hunt(
    mutant: Mutant, seconds: float, attempts: int, first_seed: int = 1, kinds: Sequence[str] = (LIBRDKAFKA,)
) -> Verdict:
    """Run the checker on the mutant until a promise of `found_by` is broken, at most `attempts` times; return the last
    verdict. `kinds` names the clients.
    """
    last_seed = first_seed + max(attempts, 1) - 1
    with mutated(mutant) as root:
        for seed in range(first_seed, last_seed):
            verdict = _run(mutant, root, seed, seconds, kinds)
            if mutant.broken(verdict):
                return verdict
        return _run(mutant, root, last_seed, seconds, kinds)


def _run(mutant: Mutant, root: Path, seed: int, seconds: float, kinds: Sequence[str]) -> Verdict:
    return run(
        *(seed, seconds),
        root=root,
        faults=mutant.faults,
        read_s=READ_S,
        store=mutant.store,
        standby=False,
        postgres=mutant.postgres,
        kinds=sorted({*kinds, *mutant.kinds}),
        say=lambda _: None,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.trust.mutants", description="See whether the checker finds planted defects."
    )
    parser.add_argument("--only", nargs="+", help="mutants whose name contains one of these texts")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the faults of one run (20)")
    parser.add_argument("--attempts", type=int, default=4, help="runs, each with another seed, per mutant (4)")
    parser.add_argument("--seed", type=int, default=1, help="the first seed (1)")
    parser.add_argument(
        "--clients", nargs="+", choices=ALL_KINDS, default=(LIBRDKAFKA,), help="kinds of clients (librdkafka)"
    )
    arguments = parser.parse_args()
    chosen = [each for each in MUTANTS if not arguments.only or any(text in each.name for text in arguments.only)]
    missed = 0
    for mutant in chosen:
        began_s = time.monotonic()
        verdict = hunt(mutant, arguments.seconds, arguments.attempts, arguments.seed, arguments.clients)
        took = f"{time.monotonic() - began_s:.0f} s"
        by = mutant.broken(verdict)
        others = [name for name, found in verdict.violations.items() if found and name not in by]
        missed += not by
        _say(f"{'found ' if by else 'MISSED'} {mutant.name} (seed {verdict.seed}, {took})")
        for name in by:
            _say(f"       {name}: {verdict.violations[name][0][:160]}")
        if others:
            _say(f"       also broken: {', '.join(others)}")
    _say(f"{len(chosen) - missed} of {len(chosen)} found")
    return 1 if missed else 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
