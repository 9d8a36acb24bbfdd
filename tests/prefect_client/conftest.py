"""A Prefect server that the modules of this folder share."""

import pytest

from lachesis.prefect_client.background_serve import TRAINING_FLOW
from lachesis.prefect_client.resources import PrefectApi
from tests.harness.prefect_server import give_database, serve_prefect


@pytest.fixture(scope="package")
def server(tmp_path_factory, empty_database):
    """The address of a server with the deployment of training runs."""
    home = tmp_path_factory.mktemp("prefect")
    give_database(home, empty_database)
    with serve_prefect(home) as api:
        flow = api._request("POST", "/flows/", {"name": TRAINING_FLOW})
        api._request("POST", "/deployments/", {"name": "train-test", "flow_id": flow["id"]})
        yield api.url


@pytest.fixture
def prefect_api(server):
    """A client of that server."""
    return PrefectApi(server)
