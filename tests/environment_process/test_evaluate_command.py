"""Atropos' `evaluate` command, by which a run is evaluated before and after training."""

from __future__ import annotations

from typing import Any

import pytest
from atroposlib.envs.base import BaseEnv

from tests.environment_process.evaluated import Env, append, append_after_a_log


async def _return(env: Env) -> dict[str, float]:
    return {"eval/accuracy": 1.0}


async def _log(env: Env) -> None:
    await env.evaluate_log({"eval/accuracy": 1.0})


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("work", [_return, append, append_after_a_log, _log])
async def test_before_and_after_training_metrics_are_given_as_during_it(work: Any) -> None:
    """By Atropos' `evaluate` command, which itself would drop what `evaluate()` returns."""

    class Logged(Env):
        def __init__(self) -> None:
            super().__init__(work)
            self.logged: list[dict[str, Any]] = []

        async def setup(self) -> None:
            self.is_set_up = True

        async def evaluate_log(self, metrics: dict[str, Any]) -> None:
            self.logged.append(metrics)
            await super().evaluate_log(metrics)

    env = Logged()
    await BaseEnv._run_evaluate(env)  # type: ignore[arg-type]
    assert env.is_set_up
    assert env.logged == [{"eval/accuracy": 1.0}]
