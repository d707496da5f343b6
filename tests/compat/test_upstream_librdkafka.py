"""What is mended in librdkafka's tests before they are compiled: values."""

from __future__ import annotations

from pathlib import Path

from tests.compat.upstream.librdkafka import lacks_order, mend

THEIRS = "  {\n    if (a.partition < b.partition)\n      return true;\n    return a.topic < b.topic;\n  }\n"


def source(directory: Path, text: str) -> Path:
    path = directory / "tests" / "0113-cooperative_rebalance.cpp"
    path.parent.mkdir()
    path.write_text(text)
    return path


def test_a_map_without_an_order_gets_one_once(tmp_path: Path) -> None:
    path = source(tmp_path, THEIRS)
    assert lacks_order(tmp_path), "built so, it is built again"
    mend(tmp_path)
    mended = path.read_text()
    assert mended.index("(a.partition > b.partition) return false;") < mended.index("(a.partition < b.partition)")
    assert not lacks_order(tmp_path)
    mend(tmp_path)
    assert path.read_text() == mended


def test_another_version_is_left_as_it_is(tmp_path: Path) -> None:
    path = source(tmp_path, "return std::tie(a.partition, a.topic) < std::tie(b.partition, b.topic);\n")
    mend(tmp_path)
    assert path.read_text().startswith("return std::tie")
    assert not lacks_order(tmp_path / "nowhere")
