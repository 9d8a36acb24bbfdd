"""The HTTP service: each route by the contract, and whatever a fuzzer thinks of."""

import gzip
import os

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance
from starlette.testclient import TestClient

from lachesis import __version__
from lachesis.agent_tools import http_routes
from lachesis.base.http_guard import load_or_create_token


@pytest.fixture
def client(home):
    with TestClient(http_routes.create_app(), base_url="http://localhost:8080") as client:
        yield client


def test_an_environment_that_cannot_be_imported_is_told(client, home, monkeypatch):
    folder = home / "envs"
    folder.mkdir()
    (folder / "broken.py").write_text("class A(BaseEnv\n")
    (folder / "raising.py").write_text("raise RuntimeError('boom')\nclass B(BaseEnv):\n    pass\n")
    monkeypatch.setenv("LACHESIS_ENVIRONMENTS", str(folder))
    for name, said in (("broken", "does not parse"), ("raising", "boom")):
        answer = client.post(f"/environments/{name}/select")
        assert answer.status_code == 409
        assert answer.json()["code"] == "environment"
        assert said in answer.json()["error"]
    assert (
        client.post("/environments/arithmetic/select", json={"model": "/nowhere"}).json()["code"]
        == "model_not_found"
    )
    assert (
        client.post("/environments/arithmetic/select", json={"profile": "tinker"}).json()["profile"]
        == "tinker"
    )


def test_post_config(client):
    client.post("/environments/arithmetic/select")
    assert client.post("/config", json={"field": "group_size", "value": 8}).json()["value"] == 8
    assert client.post("/config", json={"field": "group_size", "value": "x"}).status_code == 400
    assert client.post("/config", json={"field": "max_num_workers", "value": 1}).status_code == 403
    assert client.post("/config", json={"field": "group_size"}).json()["code"] == "arguments"
    assert (
        client.post(
            "/config", content=b'{"field": NaN', headers={"content-type": "application/json"}
        ).status_code
        == 422
    )


def test_post_runs(client):
    client.post("/environments/arithmetic/select")
    down = client.post("/runs", json={})
    assert down.status_code == 503
    assert "lachesis serve" in down.json()["error"]
    assert client.post("/runs").status_code == 503, "the body may be left out"
    assert client.post("/runs", json={"dry_run": True}).json()["dry_run"] is True


def test_two_clients_with_two_names_have_two_drafts(client):
    client.post("/environments/arithmetic/select", headers={"X-Lachesis-Session": "one"})
    assert client.get("/config", headers={"X-Lachesis-Session": "one"}).status_code == 200
    assert client.get("/config", headers={"X-Lachesis-Session": "two"}).status_code == 409
    assert client.get("/config", headers={"X-Lachesis-Session": "../x"}).json()["code"] == "config"


def test_the_page_needs_no_network(client):
    page = client.get("/docs")
    assert page.status_code == 200
    assert "https://" not in page.text
    assert client.get("/openapi.json").json()["info"]["title"] == "Lachesis"


def test_beyond_loopback_a_token_is_needed(home, monkeypatch):
    token = load_or_create_token()
    assert os.stat(home / "token").st_mode & 0o077 == 0
    assert load_or_create_token() == token
    app = http_routes.create_app(host="0.0.0.0", token=token, allowed_hosts=["gpu-box"])
    with TestClient(app, base_url="http://gpu-box:8080") as client:
        assert client.get("/health").status_code == 401
        assert client.get("/").json() == {
            "name": "lachesis",
            "version": __version__,
            "docs": "/docs",
            "health": "/health",
        }
        assert client.get("/docs").status_code == client.get("/openapi.json").status_code == 200, (
            "a browser needs the page"
        )
        assert client.get("/health", headers={"Authorization": "Bearer wrong"}).status_code == 401
        good = {"Authorization": f"Bearer {token}"}
        assert client.get("/health", headers=good).status_code == 200
        assert client.get("/health", headers={**good, "Host": "evil.example"}).status_code == 403
    monkeypatch.setenv("LACHESIS_TOKEN", "chosen")
    assert load_or_create_token() == "chosen"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "[::"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://localhost:1"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:8080"}, 200),
        ({"Host": "127.0.0.1:9"}, 200),
    ],
)
def test_foreign_pages_are_refused(client, headers, status):
    assert client.get("/environments", headers=headers).status_code == status


def test_a_server_on_another_loopback_address_serves_itself(home):
    with TestClient(
        http_routes.create_app(host="127.0.0.2", allowed_hosts=["GPU-Box"]),
        base_url="http://127.0.0.2:8080",
    ) as client:
        assert client.get("/environments").status_code == 200
        assert client.get("/environments", headers={"Host": "gpu-box:8080"}).status_code == 200


def test_a_body_beyond_a_megabyte_is_refused(client):
    """Also one that is sent in pieces, or packed."""
    chunks = (b"x" * 100_000 for _ in range(20))
    assert client.post("/config", content=chunks).status_code == 413
    bomb = gzip.compress(b" " * 50_000_000)
    assert len(bomb) < 1_000_000
    assert (
        client.post("/config", content=bomb, headers={"content-encoding": "gzip"}).status_code
        == 413
    )
    assert client.post("/config", json={"field": "x", "value": "x" * 1_000_001}).status_code == 413


@pytest.fixture
def fuzzed(home, make_run):
    """The service with a draft and a run, in the form that the fuzzer reads."""
    make_run(status="completed")
    app = http_routes.create_routes()
    TestClient(app).post("/environments/arithmetic/select")
    return schemathesis.openapi.from_asgi("/openapi.json", app)


STRANGERS: list[dict[str, str]] = [
    {},
    {"Authorization": "Bearer wrong"},
    {"Authorization": "Basic run"},
    {"X-API-Key": "run"},
]


@pytest.mark.parametrize("headers", STRANGERS)
def test_without_the_token_nothing_is_told_or_done(home, headers):
    with TestClient(
        http_routes.create_app(token="run"), base_url="http://localhost:8080"
    ) as client:
        for method, path in ROUTES:
            if path == "/":
                continue  # it tells the name and the version, which /openapi.json tells too
            place = path.format(name="arithmetic", run_id="0" * 8)
            assert client.request(method, place, headers=headers, json={}).status_code == 401
    assert not (home / "sessions").exists()


ROUTES = [
    (method, path)
    for path, methods in http_routes.create_routes().openapi()["paths"].items()
    for method in methods
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_request_is_answered_with_a_fault(fuzzed, method, path):
    @hypothesis.given(case=fuzzed[path][method.upper()].as_strategy())
    @hypothesis.settings(
        max_examples=25,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
        database=None,
    )
    def check(case):
        case.call_and_validate(
            checks=[
                not_a_server_error_but_down,
                response_schema_conformance,
                status_code_conformance,
            ]
        )

    check()


def not_a_server_error_but_down(context, response, case):
    """There is no Prefect server here, which 503 says."""
    if response.status_code != 503:
        not_a_server_error(context, response, case)


@pytest.mark.parametrize(
    ("method", "path", "status", "keys"),
    [
        ("GET", "/health", 200, "status environments_discovered current_environment active_runs"),
        ("GET", "/environments", 200, "name class_name file_path description"),
        ("POST", "/environments/arithmetic/select", 200, "environment config"),
        ("POST", "/environments/nothing/select", 404, "code available"),
        ("GET", "/config", 409, "code"),
        ("GET", "/runs", 200, "runs count"),
        ("GET", "/runs/RUN", 200, "run_id status next_steps"),
        ("GET", "/runs/ffffffff", 404, "code active_runs"),
        ("GET", "/runs/RUN/metrics", 200, "final_metrics history weights"),
        ("GET", "/runs/RUN/rollouts", 200, "rollouts message"),
        ("POST", "/runs/RUN/stop", 200, "status"),
        ("POST", "/runs/ffffffff/stop", 404, "code"),
        ("POST", "/test/inference", 409, "code"),
    ],
)
def test_each_route_answers_with_what_its_tool_says(client, make_run, method, path, status, keys):
    """Status reports are not limited: clients limit themselves."""
    run_id = make_run(status="pending").run_id
    for _ in range(2):
        answer = client.request(method, path.replace("RUN", run_id))
        content = answer.json()
        assert answer.status_code == status, content
        assert set(keys.split()) <= set(content if isinstance(content, dict) else content[0])
        assert "rate_limited" not in content
        if path.endswith("/stop"):
            break
