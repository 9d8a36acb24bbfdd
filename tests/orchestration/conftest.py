"""A Prefect server that the modules of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lachesis.orchestration.prefect_api import PrefectApi
from lachesis.orchestration.server import TRAINING_FLOW
from tests.prefect_server import serve_prefect


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with the deployment of training runs."""
    with serve_prefect(tmp_path_factory.mktemp("prefect")) as api:
        flow = api._request("POST", "/flows/", {"name": TRAINING_FLOW})
        api._request("POST", "/deployments/", {"name": "train-test", "flow_id": flow["id"]})
        yield api.url


@pytest.fixture
def prefect_api(server: str) -> PrefectApi:
    """A client of that server."""
    return PrefectApi(server)
