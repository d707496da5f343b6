"""`python -m tests.kafka.facts`: write down the facts of Apache Kafka that tests compare ours with.

The one idea: only `pom.xml` names the version. Message schemas are read from the client's jar. `Facts.java` prints
facts that only Kafka's classes contain: error codes, features and a broker's settings. The files hold facts only, and
no text of Kafka's.
"""

from __future__ import annotations

import json
import re
import subprocess
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.gateway_process import ROOT
from tests.kafka.process import LIBRARIES, assemble

PROGRAM = Path(__file__).parent / "Facts.java"
REFERENCE = ROOT / "tests" / "protocol" / "reference"
BROKER_SETTINGS = ROOT / "tests" / "gateway" / "config" / "kafka_broker_settings.tsv"
PRINT_SECONDS = 60.0

_SCHEMAS = "common/message/"
_COMMENT = re.compile(r"^\s*//.*$", re.MULTILINE)
_FACTS = (
    *("apiKey", "type", "name", "validVersions", "latestVersionUnstable", "flexibleVersions", "versions"),
    *("nullableVersions", "tag", "taggedVersions", "default", "fields", "commonStructs"),
)
_EMBEDDED = {
    "ConsumerProtocolAssignment",
    "ConsumerProtocolSubscription",
    "EndTxnMarker",
    "RequestHeader",
    "ResponseHeader",
}
"""Messages of clients that are neither requests nor responses."""


def schemas(jar: Path) -> dict[str, dict[str, Any]]:
    """Return the schema of every message that Kafka declares, from its client's jar."""
    found: dict[str, dict[str, Any]] = {}
    with zipfile.ZipFile(jar) as archive:
        for name in archive.namelist():
            if name.startswith(_SCHEMAS) and name.endswith(".json"):
                schema = json.loads(_COMMENT.sub("", archive.read(name).decode()))
                found[schema["name"]] = schema
    return found


def apis(messages: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return every API that a broker or a controller serves, in the order of its keys."""
    requests = [
        schema
        for schema in messages.values()
        if schema["type"] == "request" and schema["validVersions"] != "none" and schema.get("listeners")
    ]
    return {
        schema["name"].removesuffix("Request"): {
            "apiKey": schema["apiKey"],
            "validVersions": schema["validVersions"],
            "latestVersionUnstable": schema.get("latestVersionUnstable", False),
            "listeners": sorted(schema["listeners"]),
        }
        for schema in sorted(requests, key=lambda schema: schema["apiKey"])
    }


def clients_messages(messages: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the messages between clients and brokers by name, without those between controllers."""
    served = {api["apiKey"] for api in apis(messages).values() if "broker" in api["listeners"]}
    for name, schema in sorted(messages.items()):
        if name in _EMBEDDED or (schema["type"] in ("request", "response") and schema["apiKey"] in served):
            yield facts_of(schema)


def facts_of(schema: Any) -> Any:
    """Return the parts of a schema that determine a message's bytes, without comments and without hints for Kafka's own
    classes.
    """
    match schema:
        case dict():
            parts: dict[str, Any] = schema
            return {part: facts_of(parts[part]) for part in _FACTS if part in parts}
        case list():
            members: list[Any] = schema
            return [facts_of(each) for each in members]
        case _:
            return schema


def printed() -> dict[str, list[list[str]]]:
    """Return the output of `Facts.java`: for each kind of fact, its lines split into parts."""
    done = subprocess.run(
        ["java", "-cp", f"{LIBRARIES}/*", str(PROGRAM)],
        check=True,
        capture_output=True,
        text=True,
        timeout=PRINT_SECONDS,
        stdin=subprocess.DEVNULL,
    )
    found: dict[str, list[list[str]]] = {}
    for line in done.stdout.splitlines():
        kind, *parts = line.split("\t")
        found.setdefault(kind, []).append(parts)
    return found


def write_lines(path: Path, opening: str, lines: Iterable[str], closing: str) -> None:
    """Write one fact per line, so that the differences between two versions are readable."""
    path.write_text(f"{opening}\n" + ",\n".join(lines) + f"\n{closing}\n")


def main() -> None:
    version = assemble()
    messages = schemas(LIBRARIES / f"kafka-clients-{version}.jar")
    told = printed()
    compact = json.JSONEncoder(separators=(",", ":")).encode
    write_lines(
        REFERENCE / "messages.json",
        "{",
        (f'"{schema["name"]}": {compact(schema)}' for schema in clients_messages(messages)),
        "}",
    )
    write_lines(
        REFERENCE / "apis.json", "{", (f'"{name}": {compact(api)}' for name, api in apis(messages).items()), "}"
    )
    write_lines(
        REFERENCE / "error-codes.json",
        "[",
        (
            compact({"name": name, "code": int(code), "retriable": retriable == "true"})
            for name, code, retriable in told["error"]
        ),
        "]",
    )
    write_lines(
        REFERENCE / "features.json",
        "{",
        (f'"{name}": {compact([int(level) for level in levels])}' for name, *levels in told["feature"]),
        "}",
    )
    (REFERENCE / "version.txt").write_text(f"{version}\n")
    heading = "# name\ttype\tdefault\tinternal\tupdate mode. <null>: null. <none>: it has none, and must be set."
    lines = ("\t".join(parts) for parts in told["setting"])
    BROKER_SETTINGS.write_text("\n".join((heading, *lines)) + "\n")
    print(f"Apache Kafka {version}: {len(messages)} messages, {len(told['setting'])} settings of a broker")


if __name__ == "__main__":
    main()
