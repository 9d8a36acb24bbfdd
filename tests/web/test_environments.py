"""The pages of environments: the newest verdict, marks of earlier tests, shares and examples."""

import json

import pytest
from starlette.testclient import TestClient

from lachesis.config.launch_spec import TestSpec
from lachesis.inference_tests.forecast import GroupUsage, PlannedRun, make_forecast, sum_groups
from lachesis.inference_tests.store import InferenceRequest, InferenceTestStore
from lachesis.runs.store import RunStore
from lachesis.web.app import create_app
from tests.web.recorded import SCRIPT

VERDICT = {
    "word": "learnable",
    "evidence": ["7 of 8 groups have a signal"],
    "groups": 8,
    "reward_mean": 0.25,
    "zero_signal_share": 0.125,
    "truncation_rate": None,
    "invalid_rate": 0.0,
    "intervals": {"zero_signal_share": [0.02, 0.47], "invalid_rate": [0.0, 0.05]},
}

PLANNED = PlannedRun(total_steps=10, batch_size=8, group_size=4, base_model="m", profile="embedded")
USAGE = sum_groups([GroupUsage(rollouts=4, prefill=80, sampled=400, seconds=1)])
assert USAGE is not None
FORECAST = make_forecast(USAGE, PLANNED, None)


def add_test(store, environment, **changes):
    request = InferenceRequest(
        environment=environment,
        environment_file="f.py",
        models=["m"],
        spec=TestSpec(environment=environment),
    )
    result = {
        "models_tested": [
            {
                "model": "m",
                "accuracy": 0.25,
                "accuracy_interval": {"items": 8.0, "low": 0.07, "high": 0.59},
                "total_completions": 32,
                "verdict": VERDICT,
            }
        ],
        "summary": {"verdict": "learnable", "forecast": FORECAST.model_dump()},
    }
    values = {"status": "completed", "result": result, **changes}
    test = store.create(request, "")
    test = test.model_copy(update=values)
    store.save(test)
    return test


@pytest.fixture
def tests(clean_environment):
    return InferenceTestStore(clean_environment)


@pytest.fixture
def client(clean_environment):
    app = create_app(store=RunStore(clean_environment))
    with TestClient(app, base_url="http://localhost:8070") as client:
        yield client


def test_an_environment_has_the_verdict_of_its_newest_test(tests, client):
    old = add_test(tests, "arithmetic", created_at="2026-01-01T00:00:00+00:00")
    new = add_test(tests, "arithmetic", created_at="2026-01-02T00:00:00+00:00", status="failed",
                   error=f"it raised {SCRIPT}", result=None)  # fmt: skip
    add_test(tests, "gone_from_here")
    text = client.get("/environments").text
    assert "One of " in text
    assert "needs a look." in text
    assert "were never tested." in text
    assert SCRIPT not in text
    row = text[text.index("arithmetic") :]
    assert row.index(f"/tests/{old.test_id}") < row.index(f'href="/tests/{new.test_id}" title')
    assert "its file is no longer found" in text
    csv = client.get("/environments.csv").text
    assert f"arithmetic,failed,it raised {SCRIPT}" in csv
    lines = client.get("/tests.csv").text.splitlines()
    assert [line.split(",")[0] for line in lines[2:4]] == [new.test_id, old.test_id]


def test_a_test_shows_shares_with_intervals_and_examples(tests, client):
    test = add_test(tests, "arithmetic")
    line = {"prompt": "1+1=", "responses": ["2", "3", SCRIPT], "scores": [1.0, 0.0, 0.0]}
    tests.get_samples_file(test, "m").write_text(json.dumps(line) + "\n")
    text = client.get(f"/tests/{test.test_id}").text
    assert "A model can learn from it." in text
    assert "7 of 8 groups have a signal" in text
    assert "11.5 k to 26.9 k" in text
    for words in ("0.250", "0.070 to 0.590", "n 8 items", "0.125", "0.020 to 0.470"):
        assert words in text
    assert "truncated answers" not in text
    assert f'href="/tests/{test.test_id}.csv"' in text
    shares = client.get(f"/tests/{test.test_id}.csv").text
    assert "groups without a signal,0.125," in shares
    assert "1+1=" in text
    assert SCRIPT not in text


def test_a_test_that_goes_on_has_no_verdict(tests, client):
    test = add_test(tests, "arithmetic", status="running", result=None)
    text = client.get(f"/tests/{test.test_id}").text
    assert "It is being tested." in text
    assert "testing" in client.get("/environments").text


def test_an_unknown_test_is_not_found(client):
    answer = client.get("/tests/0123abcd")
    assert answer.status_code == 404
    assert "there is no inference test" in answer.text
