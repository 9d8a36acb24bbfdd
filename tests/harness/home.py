"""Runs on disk, for tests to which most of a run does not matter."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lachesis.config.launch_spec import LaunchSpec
from lachesis.config.run_config import resolve_run_config
from lachesis.rollouts.parquet_files import RolloutFolder
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore
from lachesis.tiny_model import build
from tests.harness.openai_endpoint import Endpoint, serving


def make_record(set_fields: dict[str, Any] | None = None, **changes: Any) -> RunRecord:
    """Return a record that is valid, with these fields changed, of a launch that has set others."""
    values: dict[str, Any] = {
        "run_id": "0123abcd",
        "environment": "sums",
        "environment_file": "sums.py",
        "profile": "embedded",
        "base_model": "m",
        "total_steps": 9,
        "seed": 0,
        "wandb_project": "p",
        "wandb_run_name": "n",
    }
    values |= changes
    spec = LaunchSpec(environment=values["environment"], profile=values["profile"])
    return RunRecord(**{"spec": spec.with_set_fields(set_fields or {}), **values})


def create_run(store: RunStore, **values: Any) -> RunRecord:
    """Write a run with a new id, and return its record; see `write_run`."""
    return write_run(store, run_id=store.new_id(), **values)


def write_run(
    store: RunStore,
    steps: Sequence[float | dict[str, Any]] = (),
    *,
    edits: dict[str, dict[str, Any]] | None = None,
    rollouts: Sequence[dict[str, Any]] = (),
    **changes: Any,
) -> RunRecord:
    """Write a run to a home and return its record.

    Args:
        store: The runs of the home.
        steps: The metrics of each step, or its mean reward alone.
        edits: The fields of its configuration that are no defaults, by section.
        rollouts: Its rollouts; see `make_row`.
        **changes: Fields of the record.
    """
    record = make_record(**changes)
    model, profile = record.base_model, record.profile
    config = resolve_run_config(record.environment, profile, edits or {}, model=model)
    run_dir = store.create(record, config.to_yaml())
    for step, values in enumerate(steps, 1):
        line = values if isinstance(values, dict) else {"reward/mean": values}
        MetricsFile(run_dir.metrics).append(step, line)
    if rollouts:
        RolloutFolder(run_dir.rollouts, 10**9).append(list(rollouts))
    return record


@pytest.fixture
def store(clean_environment: Path) -> RunStore:
    """The runs of the test's own home."""
    return RunStore(clean_environment)


def make_row(step: int, group: int, rollout: int, score: float, **changes: Any) -> dict[str, Any]:
    """Return one rollout with these values."""
    return {
        "step": step,
        "group": group,
        "rollout": rollout,
        "environment": "sums",
        "item_key": f"key{group}",
        "item": f'{{"question": "{group}+1="}}',
        "prompt": f"{group}+1=",
        "answer": str(score),
        "score": score,
        "parts": [("form", score / 2)],
        "advantage": score - 0.5,
        "outcome": "trained",
        "reason": None,
        "tokens": [1, 2, 3],
        "sampled": [False, False, True],
        "logprobs": [None, None, -0.5],
        "trained_logprobs": [None, None, -0.25],
        "weights_version": step - 1,
        **changes,
    }


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of a test run share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def tiny_model(shared_folder: Path) -> Path:
    """The home in which the warm-started tiny model is; made once."""
    build.ensure_tiny_model(build.TinyModelRecipe(), shared_folder / "tiny")
    return shared_folder / "tiny"


@pytest.fixture(scope="session")
def schemas(shared_folder: Path) -> Path:
    """Where the schemas of environments are kept, for all homes: learning one takes seconds. Their
    names depend on all that they depend on.
    """
    folder = shared_folder / "schemas"
    folder.mkdir(exist_ok=True)
    return folder


def share_schemas(home: Path, schemas: Path) -> None:
    """Let a home use the schemas that other tests have learnt."""
    (home / "cache").mkdir(parents=True, exist_ok=True)
    (home / "cache" / "schemas").symlink_to(schemas)


@pytest.fixture(scope="session")
def new_home(
    tiny_model: Path, schemas: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], Path]:
    """A factory of homes that have the model already."""

    def make() -> Path:
        home = tmp_path_factory.mktemp("home")
        (home / "models").symlink_to(tiny_model / "models")
        share_schemas(home, schemas)
        return home

    return make


@pytest.fixture(scope="session")
def endpoint() -> Iterator[Endpoint]:
    """Where inference tests of served homes ask models by name."""
    with serving() as server:
        yield server
