"""One browser for all tests of a module: each test has a page and cookies of its own in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.e2e.prefect_pages import CHROMIUM, FLAGS


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Headless Chromium. Starting it takes longer than most of the tests."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()
