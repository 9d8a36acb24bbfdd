"""A policy of the embedded engine."""

from __future__ import annotations

from typing import Any

import pytest

from lachesis.config import run_config as run_config
from lachesis.trainer.policy import Policy


@pytest.fixture
async def policy(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TINKER_BASE_URL", engine.url)
    monkeypatch.setenv("TINKER_API_KEY", engine.token)
    policy = await Policy.create(
        run_config.resolve_run_config("arithmetic", "embedded", {}, model=engine.model),
        resume_from=None,
    )
    await policy.publish()
    yield policy
    await policy.close("success")
