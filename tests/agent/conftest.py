"""Fixtures: a desk whose environment schemas are known already, so that no test imports an environment again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lachesis import config as configuration
from lachesis import discovery
from lachesis.agent.desk import Desk
from lachesis.agent.tools import TABLE, Call
from lachesis.runs import RunRecord, RunStore

Json = dict[str, Any]


@pytest.fixture(scope="session")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of a home in which the environment has been looked at once."""
    home = tmp_path_factory.mktemp("schemas")
    before, os.environ["LACHESIS_HOME"] = os.environ.get("LACHESIS_HOME"), str(home)
    try:
        discovery.schema(discovery.find("arithmetic"))
    finally:
        if before is None:
            del os.environ["LACHESIS_HOME"]
        else:
            os.environ["LACHESIS_HOME"] = before
    return home / "cache"


@pytest.fixture
def home(clean_environment: Path, schemas: Path) -> Path:
    clean_environment.mkdir()
    (clean_environment / "cache").symlink_to(schemas)
    return clean_environment


@pytest.fixture
def desk(home: Path) -> Desk:
    return Desk("test")


@pytest.fixture
def ask(desk: Desk) -> Callable[..., Json]:
    """Call a tool of the table; its answer, or its error as JSON."""

    def call(tool: str, /, **arguments: Any) -> Json:
        return TABLE[tool].call(Call(desk), arguments)[0]

    return call


@pytest.fixture
def make_run(home: Path) -> Callable[..., RunRecord]:
    """A run on disk that no server knows."""

    def make(**changes: Any) -> RunRecord:
        store = RunStore(home)
        run_id = store.new_id()
        known: Json = {
            "run_id": run_id,
            "environment": "arithmetic",
            "environment_file": "arithmetic.py",
            "profile": "embedded",
            "base_model": "tiny",
            "total_steps": 10,
            "seed": 0,
            "status": "running",
            "wandb_project": "p",
            "wandb_run_name": f"arithmetic-{run_id}",
        }
        record = RunRecord.model_validate({**known, **changes})
        store.create(record, configuration.resolve("arithmetic", record.profile, {}, home=home).to_yaml())
        return record

    return make
