"""Tests from the sources of librdkafka and of Go clients: repairs before they are compiled, and answers for tests that
do not run.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tests.compat.upstream import go_tests, librdkafka
from tests.compat.upstream.librdkafka import lacks_order, mend

THEIRS = "  {\n    if (a.partition < b.partition)\n      return true;\n    return a.topic < b.topic;\n  }\n"


def source(directory: Path, text: str) -> Path:
    path = directory / "tests" / "0113-cooperative_rebalance.cpp"
    path.parent.mkdir()
    path.write_text(text)
    return path


def test_a_map_without_an_order_is_repaired_once(tmp_path: Path) -> None:
    path = source(tmp_path, THEIRS)
    assert lacks_order(tmp_path), "built so, it is built again"
    mend(tmp_path)
    mended = path.read_text()
    assert mended.index("(a.partition > b.partition) return false;") < mended.index("(a.partition < b.partition)")
    assert not lacks_order(tmp_path)
    mend(tmp_path)
    assert path.read_text() == mended


def test_another_version_is_not_changed(tmp_path: Path) -> None:
    path = source(tmp_path, "return std::tie(a.partition, a.topic) < std::tie(b.partition, b.topic);\n")
    mend(tmp_path)
    assert path.read_text().startswith("return std::tie")
    assert not lacks_order(tmp_path / "nowhere")


WANTS, ALONE = "TestWants", "TestRing"
OIDC, MOCK = "0126_oauthbearer_oidc", "0105_transactions_mock"


@pytest.mark.parametrize(("broker", "outcome"), [("sluice", "unserved"), ("kafka", "skipped")])
@pytest.mark.parametrize(("wants", "alone"), [(WANTS, ALONE), (OIDC, MOCK)])
def test_a_test_that_needs_an_unserved_feature_is_not_reported_as_skipped(
    broker: str,
    outcome: str,
    wants: str,
    alone: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COMPAT_BROKER", broker)
    monkeypatch.setenv("COMPAT_BOOTSTRAP", "nowhere:1")
    monkeypatch.setenv("COMPAT_SCENARIOS", f"upstream.{wants},upstream.{alone}")
    if wants == WANTS:
        left_out = {wants: "is not served", alone: "wants no broker"}
        allowed = go_tests.AllowList((), frozenset(), left_out, frozenset({wants}), frozenset())
        monkeypatch.setattr(go_tests.AllowList, "load", lambda name: allowed)
        package = tmp_path / "source" / "pkg" / "kgo"
        package.mkdir(parents=True)
        (package / "auth_test.go").write_text("".join(f"func {name}(t *testing.T) {{}}\n" for name in (wants, alone)))
        go_tests.run("franz_go", tmp_path)
    else:
        choice, listed = librdkafka.Choice(wants), librdkafka.AllowList.load()
        changed = dataclasses.replace(
            listed,
            run=tuple(each for each in listed.run if each != choice),
            left_out={**listed.left_out, choice: "is not served"},
            unserved=frozenset({choice}),
        )
        monkeypatch.setattr(librdkafka.AllowList, "load", lambda: changed)
        tests = tmp_path / "source" / "tests"
        tests.mkdir(parents=True)
        entries = "".join(f"_TEST({name}, 0),\n" for name in (wants, alone))
        (tests / "test.c").write_text(f"struct test tests[] = {{\n{entries}{{NULL}}\n}};\n")
        (tmp_path / "source" / "config.h").write_text('#define BUILT_WITH "GCC"\n')
        (tmp_path / "version").write_text("2.0.2")
        librdkafka.run(tmp_path)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    said = {row["scenario"]: row["outcome"] for row in rows}
    assert (said[f"upstream.{wants}"], said[f"upstream.{alone}"]) == (outcome, "skipped")
