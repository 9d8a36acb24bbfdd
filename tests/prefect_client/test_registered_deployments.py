"""The runner and the monitor keep a real Prefect server in order: flow runs that wait, and the
choices in forms.
"""

from pathlib import Path

import pytest

from lachesis.base.json_text import Json
from lachesis.prefect_client import forms, runs_from_prefect
from lachesis.prefect_client.background_serve import NIGHTLY_FLOW, TRAINING_FLOW
from lachesis.runs.store import RunStore

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def home(server, monkeypatch, clean_environment):
    monkeypatch.setenv("PREFECT_API_URL", server)
    monkeypatch.setenv("LACHESIS_DEPLOYMENT", "test")
    monkeypatch.setattr(runs_from_prefect, "MIN_WAIT_S", 0.0)
    return clean_environment


def make_deployment(api, flow, name, **values):
    """Make a deployment without a runner, and return its id."""
    flow_id = api._request("POST", "/flows/", {"name": flow})["id"]
    body = {"name": name, "flow_id": flow_id, **values}
    return str(api._request("POST", "/deployments/", body)["id"])


def start(api, deployment_id, parameters, key):
    flow_run = api.create_flow_run(
        deployment_id, name=key, parameters=parameters, tags=["lachesis"], key=key
    )
    return str(flow_run["id"])


def test_a_flow_run_that_waits_has_its_run_or_is_refused(home, prefect_api):
    """Nobody would list it otherwise before it begins, which can take hours."""
    deployment = prefect_api.read_deployment(TRAINING_FLOW, "train-test")
    assert deployment is not None
    values: Json = {"environment": "arithmetic", "steps": 7}
    good = start(prefect_api, deployment["id"], values, "good")
    bad = start(prefect_api, deployment["id"], {**values, "model": "/nowhere"}, "bad")
    for _ in range(2):  # The second look must not make a second run.
        runs_from_prefect.record_waiting_runs()
        (record,) = RunStore(home).all()
        assert (record.flow_run_id, record.status, record.total_steps) == (good, "pending", 7)
    waiting = prefect_api.read_flow_run(good) or {}
    assert waiting["state"]["type"] == "SCHEDULED"
    assert waiting["name"].endswith(record.run_id)
    assert set(waiting["tags"]) == {"lachesis", f"run:{record.run_id}", "environment:arithmetic"}
    state = (prefect_api.read_flow_run(bad) or {})["state"]
    assert (state["type"], state["name"]) == ("FAILED", "Refused")
    assert state["message"].startswith("/nowhere is not a model")
    prefect_api.cancel(good, "the end of the test")


def test_a_server_that_is_gone_does_not_end_the_runner(home, monkeypatch, caplog):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    runs_from_prefect.record_waiting_runs()
    assert "waiting flow runs were not recorded" in caplog.text


def test_the_forms_follow_the_environments(home, prefect_api, monkeypatch, tmp_path):
    schema = {
        "type": "object",
        "properties": {
            "environments": {"type": "array", "items": {"type": "string", "enum": ["gone"]}},
            "models": {"type": "array", "items": {"type": "string"}},
        },
    }
    make_deployment(prefect_api, NIGHTLY_FLOW, "nightly-test", parameter_openapi_schema=schema)

    def read_choices():
        deployment = prefect_api.read_deployment(NIGHTLY_FLOW, "nightly-test") or {}
        fields = deployment["parameter_openapi_schema"]["properties"]
        assert fields["models"] == schema["properties"]["models"]  # type: ignore[index]
        return list(fields["environments"]["items"]["enum"])

    assert forms.update_environment_choices(home) == [NIGHTLY_FLOW]
    before = read_choices()
    assert "arithmetic" in before
    assert "gone" not in before
    assert forms.update_environment_choices(home) == [], "nothing has changed"

    source = Path(__file__).parents[2] / "environments" / "reverse_text.py"
    (tmp_path / "newcomer.py").write_text(source.read_text().replace("reverse_text", "newcomer"))
    monkeypatch.setenv("LACHESIS_ENVIRONMENTS", str(tmp_path))
    assert forms.update_environment_choices(home) == [NIGHTLY_FLOW]
    assert read_choices() == sorted({*before, "newcomer"})
