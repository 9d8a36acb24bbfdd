"""A policy of the embedded engine, and a run that was trained, with its checkpoints."""

import shutil

import pytest

from lachesis.config import run_config as run_config
from lachesis.runs.folder import RunDir
from lachesis.trainer.trained_model import Policy
from tests.trainer.test_exact_resume import Run


@pytest.fixture
async def policy(engine, monkeypatch):
    monkeypatch.setenv("TINKER_BASE_URL", engine.url)
    monkeypatch.setenv("TINKER_API_KEY", engine.token)
    policy = await Policy.create(
        run_config.resolve_run_config("arithmetic", "embedded", {}, model=engine.model),
        resume_from=None,
    )
    await policy.publish()
    yield policy
    await policy.close("success")


@pytest.fixture(scope="session")
def trained(tmp_path_factory, random_model):
    """A run with checkpoints of the steps 2, 4 and 6."""
    tinker = {"save_checkpoint_interval": 2, "keep_checkpoints": 5}
    run = Run(tmp_path_factory.mktemp("trained"), random_model, steps=6, tinker=tinker)
    run.attempt()
    return run


@pytest.fixture
def folder(trained, tmp_path):
    """A copy of the run's folder, for the test to change."""
    shutil.copytree(trained.folder.path, tmp_path / "runs" / trained.record.run_id)
    return RunDir(tmp_path / "runs", trained.record.run_id)
