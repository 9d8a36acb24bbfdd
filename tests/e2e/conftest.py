"""A served home for the end-to-end tests of a worker."""

from pathlib import Path

import pytest

from tests.harness.prefect_server import give_database
from tests.harness.served_home import ServedHome, make_serve_env

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def calm(tmp_path_factory):
    """The folder of the environment `calm`: the sums, no faster than other tests beside it can
    bear.
    """
    source = (ROOT / "environments" / "arithmetic.py").read_text()
    for old, new in (
        ('name = "arithmetic"', 'name = "calm"'),
        (
            "        if not self.queue:",
            "        await asyncio.sleep(0.1)\n        if not self.queue:",
        ),
    ):
        assert source.count(old) == 1
        source = source.replace(old, new)
    folder = tmp_path_factory.mktemp("environments")
    (folder / "calm.py").write_text(source)
    return str(folder)


@pytest.fixture(autouse=True)
def in_served_home(request, monkeypatch):
    """What a test calls itself uses the served home too."""
    if "served" in request.fixturenames:
        monkeypatch.setenv("LACHESIS_HOME", str(request.getfixturevalue("served").home))


@pytest.fixture(scope="package")
def served(new_home, endpoint, calm, empty_database):
    """A home whose launcher runs until the last test of this folder; an idle one takes a tenth of a
    core from the others. Its forms offer the environment `calm` too.
    """
    served = ServedHome(new_home(), **make_serve_env(endpoint), LACHESIS_ENVIRONMENTS=calm)
    give_database(served.home / "prefect", empty_database)
    with served.served():
        yield served


@pytest.fixture(scope="package")
def served_home(served):
    return served.home


@pytest.fixture(scope="package")
def cli(served):
    return served.cli


@pytest.fixture(scope="package")
def agent(served):
    return served.agent


@pytest.fixture(scope="package")
def wait_ended(served):
    return served.wait_until_ended
