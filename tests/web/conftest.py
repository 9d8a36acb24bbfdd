"""Fixtures of the pages: a home of recorded runs, a client, and one browser for each module."""

import pytest
from playwright.sync_api import sync_playwright
from starlette.testclient import TestClient

from lachesis.web.app import create_app
from tests.e2e.prefect_pages import CHROMIUM, FLAGS
from tests.web.recorded import ADDRESS, fill_home


@pytest.fixture(scope="module")
def chromium():
    """Headless Chromium, which takes longer to start than most of the tests take; each test has
    a page and cookies of its own in it.
    """
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def store(clean_environment):
    return fill_home(clean_environment)


@pytest.fixture
def client(store):
    """A client that needs no token."""
    with TestClient(create_app(store=store), base_url=ADDRESS) as client:
        yield client
