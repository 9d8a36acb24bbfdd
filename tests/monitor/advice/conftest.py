"""A home for the tests of advice, and its runs."""

import shutil

import pytest

from lachesis.runs.store import RunStore


@pytest.fixture(scope="package")
def home(tmp_path_factory):
    """One for all tests: it keeps what an environment's configuration is, which takes seconds to
    find out.
    """
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def store(home, monkeypatch):
    monkeypatch.setenv("LACHESIS_HOME", str(home))
    monkeypatch.setenv("TINKER_API_KEY", "tml-no-key")
    shutil.rmtree(home / "runs", ignore_errors=True)
    return RunStore(home)
