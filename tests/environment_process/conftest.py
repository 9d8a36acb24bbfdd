"""Atropos with the hooks of an evaluation."""

import pytest
from atroposlib.envs.base import APIServerConfig, BaseEnv
from atroposlib.envs.server_handling.server_baseline import APIServer
from atroposlib.envs.server_handling.server_manager import ServerManager

from lachesis.environment_process import evaluation_recorder
from tests.harness.openai_endpoint import serving


@pytest.fixture
def installed(monkeypatch):
    """Two servers, ours and a judge's, and a manager of both."""
    for cls, names in (
        (APIServer, evaluation_recorder.SAMPLING_METHODS),
        (BaseEnv, ("evaluate_log",)),
    ):
        for name in names:
            monkeypatch.setattr(cls, name, getattr(cls, name))
    with serving() as ours, serving() as judge:
        configs = [
            APIServerConfig(
                base_url=one.url,
                api_key="k",
                model_name="right",
                server_type="openai",
                health_check=False,
            )
            for one in (ours, judge)
        ]
        with monkeypatch.context() as patched:
            patched.setattr(ServerManager, "servers", None, raising=False)
            evaluation_recorder.install_evaluation_hooks()
            yield ServerManager(configs), ours, judge
