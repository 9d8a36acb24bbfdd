"""No request, however wrong, ends the engine or is obeyed without its token."""

from typing import Any, cast

import httpx
import pytest
import tinker

from lachesis.tinker_server.routes import create_app
from tests.harness.fuzz import damage, fuzz, refusals, routes

SCHEMA = create_app(cast(Any, None), "tml-x").openapi()


@pytest.fixture(scope="module")
def own(start_engine, random_model):
    """An engine that no other test uses."""
    return start_engine(random_model)


@pytest.fixture(autouse=True)
def alive(own):
    yield
    assert own.process.poll() is None


@pytest.mark.parametrize(("method", "path"), routes(SCHEMA))
def test_no_request_is_answered_with_a_fault(own, method, path):
    fuzz(SCHEMA, method, path, own.url, {"X-API-Key": own.token}, examples=10)


def test_strangers_are_refused(own):
    """Files are fetched by signed address instead of the token."""
    for method, path, headers, owed, came in refusals(SCHEMA, own.url):
        signed = path.startswith("/download/") and owed == 401
        assert came == (400 if signed else owed), (method, path, headers)


def test_text_that_nobody_can_encode_is_refused(own):
    headers = {"X-API-Key": own.token, "content-type": "application/json"}
    with httpx.Client(base_url=own.url, trust_env=False, headers=headers) as client:
        assert (
            client.post("/api/v1/retrieve_future", content=b'{"request_id": "\\ud800"}').status_code
            < 500
        )
        assert (
            client.post(
                "/api/v1/create_session", content=b'{"session_id": ["\\ud800"], "tags": 7}'
            ).status_code
            < 500
        )
        assert (
            client.post("/api/v1/get_info", content=b'{"model_id": "\\ud800"}').status_code == 404
        )
        assert (
            client.post("/api/v1/get_info", content=b'{"model_id": ["\\ud800"]}').status_code == 422
        )
        assert client.get("/download/%C3%A9/a/weights/b/c").status_code == 403


def test_damaged_bodies_of_a_training_step_are_refused(own, monkeypatch):
    """Each is a fault of the client, at once or through its future; and the same client goes on."""
    sent: list[tuple[bytes, dict[str, str]]] = []
    send = httpx.AsyncClient.send

    async def spy(self, request, **options):
        if request.url.path.endswith("/forward_backward"):
            sent.append((request.content, dict(request.headers)))
        return await send(self, request, **options)

    monkeypatch.setattr(httpx.AsyncClient, "send", spy)
    client = tinker.ServiceClient(base_url=own.url, api_key=own.token)
    training = client.create_lora_training_client(base_model=own.model, rank=4, seed=1).result()
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
    )
    training.forward_backward([datum], "cross_entropy").result()
    (body, headers) = sent[0]
    headers.pop("content-length")
    with httpx.Client(base_url=own.url, trust_env=False, headers=headers, timeout=30) as plain:
        for changed in damage(body, 150):
            answer = plain.post("/api/v1/forward_backward", content=changed)
            assert answer.status_code < 500, (answer.text, changed)
            if answer.status_code == 200:
                found = plain.post(
                    "/api/v1/retrieve_future",
                    json=answer.json(),
                    headers={"content-type": "application/json"},
                )
                assert found.status_code == 200
                if found.headers["content-type"].startswith("application/json"):
                    assert found.json().get("category") != "server", (found.text, changed)
    assert training.forward_backward([datum], "cross_entropy").result().metrics
    client.close("success").result()
