"""A synthetic next release: the sources of the current release with one more migration, and with a function that has
other parameters.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from storage.schema import migrations
from tests.gateway_process import ROOT

ROOMS = ("gateway", "protocol", "storage")

MIGRATION = """
alter table node add column withdrawn_by text;
alter table partition add column upgraded boolean not null default true;
"""

CHANGES = {
    "storage/functions/nodes.sql": {
        "create function withdraw_node(p_node_id integer, p_incarnation bigint)": (
            "create function withdraw_node(p_node_id integer, p_incarnation bigint, p_withdrawn_by text)"
        ),
        "update node set expires_at = clock_timestamp(), incarnation = incarnation + 1\n": (
            "update node\n"
            "    set expires_at = clock_timestamp(), incarnation = incarnation + 1, withdrawn_by = p_withdrawn_by\n"
        ),
    },
    "storage/queries/nodes.sql": {"select withdraw_node($1, $2);": "select withdraw_node($1, $2, 'next');"},
}
"""For each file, the text to replace and its replacement. When a node withdraws, it calls the function of its own
release.
"""


def write_next_release(directory: Path) -> Path:
    """Write the sources of the next release below `directory`, and return it."""
    for room in ROOMS:
        shutil.copytree(ROOT / room, directory / room, ignore=shutil.ignore_patterns("__pycache__"))
    number = len(migrations()) + 1
    (directory / "storage" / "migrations" / f"{number:04}_next.sql").write_text(MIGRATION, encoding="utf-8")
    for name, replacements in CHANGES.items():
        path = directory / name
        text = path.read_text(encoding="utf-8")
        for before, after in replacements.items():
            assert text.count(before) == 1, f"{name} does not have {before!r} once"
            text = text.replace(before, after)
        path.write_text(text, encoding="utf-8")
    return directory
