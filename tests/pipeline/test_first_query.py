"""The code blocks of docs/first-query.md run as printed, except that the archive is at another place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from pyspark.sql import SparkSession

from pipeline import session
from tests.gateway_process import ROOT, GatewayProcess
from tests.pipeline import jobs, topics

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("interpreted")]
PAGE = ROOT / "docs" / "first-query.md"


def test_every_block_of_the_page_runs(
    spark: SparkSession, gateway: GatewayProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topics.make(gateway.bootstrap, "orders", 1)
    prices = [b'{"price": %d.5}' % number for number in range(4)]
    given = [(0, b"key %d" % (at % 2), price, topics.START_MS, []) for at, price in enumerate(prices)]
    topics.fill(gateway.bootstrap, "orders", given)
    jobs.archive(spark, gateway.bootstrap, str(tmp_path / "events"), "--topics", "orders", "--value", "json")
    jobs.latest(spark, str(tmp_path / "events"), str(tmp_path / "newest"))
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    printed: list[str] = []
    for block in blocks:
        assert "/lake/" in block
        names: dict[str, Any] = {}
        with patch.object(session, "open_session", lambda options: spark):
            exec(block.replace("/lake/", f"{tmp_path}/"), names)
        printed.append(capsys.readouterr().out)
    by_spark, by_pandas, by_duckdb, newest = printed
    assert re.search(r"\|\s+4\|\s+8\.0\|", by_spark)
    assert re.search(r"count\s+4\.0+\nmean\s+2\.0+\n", by_pandas)
    assert by_duckdb.strip().endswith(", 4, 8.0)]")
    assert sorted(re.findall(r"key (\d) +(\d)\n", newest)) == [("0", "1"), ("1", "1")]
