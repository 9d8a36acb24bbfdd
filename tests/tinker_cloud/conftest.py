"""One rehearsal cloud with untrained stand-ins for all tests of a worker."""

import pytest

from tests.tinker_cloud.running import serve_cloud
from tests.tinker_cloud.stand_ins import STAND_INS, ensure_stand_in


@pytest.fixture(scope="session")
def served_cloud(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cloud")
    for name in STAND_INS:
        ensure_stand_in(name, folder / "hf")
    with serve_cloud(folder) as cloud:
        yield cloud


@pytest.fixture
def cloud(served_cloud, monkeypatch):
    """The rehearsal cloud without a fault, and this process as its client."""
    for name, value in served_cloud.env.items():
        monkeypatch.setenv(name, value)
    served_cloud.lift()
    yield served_cloud
    served_cloud.lift()
