"""The real SDK against our engine."""

import pytest
import tinker

from lachesis.base.tinker_client import wait_for_sdk


@pytest.fixture(scope="session")
def service(engine):
    client = tinker.ServiceClient(base_url=engine.url, api_key=engine.token)
    yield client
    if hasattr(client, "close"):
        wait_for_sdk(client.close("success"))


@pytest.fixture
def training(service, engine):
    """A fresh adapter of rank 8."""
    return wait_for_sdk(
        service.create_lora_training_client(base_model=engine.model, rank=8, seed=1)
    )
