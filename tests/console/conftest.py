"""Fixtures: a console for each module, and one browser for the session."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.conftest import gateways
from tests.console.consoles import Consoled, start_consoled
from tests.postgres import Databases


@pytest.fixture(scope="module")
def console(postgres: Databases) -> Iterator[Consoled]:
    with gateways(postgres) as factory:
        consoled = start_consoled(factory)
        try:
            yield consoled
        finally:
            consoled.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = shutil.which("chromium")
    assert program is not None, "chromium is not installed; on Debian: apt-get install chromium"
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield opened
        finally:
            opened.close()
