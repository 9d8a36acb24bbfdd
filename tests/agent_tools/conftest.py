"""Fixtures: a desk whose environment schemas are known already, so that no test imports an
environment again.
"""

import pytest

from lachesis.agent_tools.answers import ANSWER_KEYS
from lachesis.agent_tools.session import AgentSession
from lachesis.agent_tools.tools import TOOLS, CallContext
from lachesis.prefect_client import submit
from lachesis.runs.store import RunStore
from tests.harness.home import write_run


@pytest.fixture
def home(clean_environment):
    return clean_environment


@pytest.fixture
def desk(home):
    return AgentSession("test")


@pytest.fixture
def ask(desk):
    """Call a tool of the table; its answer, or its error as JSON."""

    def call(tool, /, **arguments):
        answer, error = TOOLS[tool].run_safely(CallContext(desk), arguments)
        if error is None:
            assert_keys_are_known(tool, answer)
        return answer

    return call


def assert_keys_are_known(tool, answer):
    """Fail if an answer has other keys than docs/reference/tools.md says."""
    names = ANSWER_KEYS[tool].split()
    required = {name for name in names if not name.endswith("?")}
    allowed = {name.rstrip("?") for name in names} | {"shortened"}
    assert required <= set(answer) <= allowed, (tool, set(answer) ^ allowed)


@pytest.fixture
def make_run(home):
    """A run on disk that no server knows."""

    def make(**changes):
        store = RunStore(home)
        run_id = store.new_id()
        fields = {
            "environment": "arithmetic",
            "base_model": "tiny",
            "total_steps": 10,
            "status": "running",
            "wandb_run_name": f"arithmetic-{run_id}",
        }
        return write_run(store, run_id=run_id, **{**fields, **changes})

    return make


@pytest.fixture
def submitted(monkeypatch):
    """The run ids that were handed to the server, in place of a server."""
    ids: list[str] = []

    def submit_run(store, record):
        ids.append(record.run_id)
        return store.update(
            record.run_id,
            flow_run_id=f"flow-{record.run_id}",
            prefect_api_url="http://127.0.0.1:9/api",
        )

    monkeypatch.setattr(submit, "submit_run", submit_run)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    return ids
