"""Too many requests at once."""

from fastapi.testclient import TestClient

from lachesis.engine.embedded_engine import Engine
from lachesis.tinker_server import request_queue, routes


def test_a_client_of_a_full_engine_is_told_to_come_later(random_model, tmp_path, monkeypatch):
    """429 makes the SDK wait a second and send the request again; nobody else notices."""
    engine = Engine(random_model, tmp_path)
    with TestClient(routes.create_app(engine, "tml-x"), headers={"X-API-Key": "tml-x"}) as client:
        session = client.post("/api/v1/create_session", json={}).json()["session_id"]
        made = client.post(
            "/api/v1/create_sampling_session",
            json={"session_id": session, "sampling_session_seq_id": 0, "base_model": random_model},
        ).json()
        body = {
            "sampling_session_id": made["sampling_session_id"],
            "seq_id": 0,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
            "sampling_params": {"max_tokens": 3},
        }
        monkeypatch.setattr(request_queue, "MAX_WAITING_REQUESTS", 0)
        refused = client.post("/api/v1/asample", json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        monkeypatch.setattr(request_queue, "MAX_WAITING_REQUESTS", 10)
        accepted = client.post("/api/v1/asample", json=body).json()
        answer = client.post("/api/v1/retrieve_future", json={"request_id": accepted["request_id"]})
        assert answer.headers["content-type"] == "application/x-protobuf"
