"""A served home for the end-to-end tests of a worker."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.openai_endpoint import Endpoint
from tests.harness.prefect_server import give_database
from tests.harness.served_home import ServedHome, make_serve_env

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> str:
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
def in_served_home(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test calls itself uses the served home too."""
    if "served" in request.fixturenames:
        monkeypatch.setenv("LACHESIS_HOME", str(request.getfixturevalue("served").home))


@pytest.fixture(scope="package")
def served(
    new_home: Callable[[], Path], endpoint: Endpoint, calm: str, empty_database: Path
) -> Iterator[ServedHome]:
    """A home whose launcher runs until the last test of this folder; an idle one takes a tenth of a
    core from the others. Its forms offer the environment `calm` too.
    """
    served = ServedHome(new_home(), **make_serve_env(endpoint), LACHESIS_ENVIRONMENTS=calm)
    give_database(served.home / "prefect", empty_database)
    with served.served():
        yield served


@pytest.fixture(scope="package")
def served_home(served: ServedHome) -> Path:
    return served.home


@pytest.fixture(scope="package")
def cli(served: ServedHome) -> Callable[..., Any]:
    return served.cli


@pytest.fixture(scope="package")
def agent(served: ServedHome) -> Callable[..., Any]:
    return served.agent


@pytest.fixture(scope="package")
def wait_ended(served: ServedHome) -> Callable[..., Any]:
    return served.wait_until_ended
