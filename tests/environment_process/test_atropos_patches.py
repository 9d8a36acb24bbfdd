"""Each trap of Atropos that is mended in the environment's child; without the mending each of these
fails.
"""

import asyncio
import importlib.metadata
import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from atroposlib.envs import base
from atroposlib.envs.base import APIServerConfig, BaseEnv
from atroposlib.envs.server_handling.server_baseline import APIServer
from atroposlib.envs.server_handling.server_manager import ServerManager
from transformers import PreTrainedTokenizerBase

from lachesis.environment_process import atropos_patches
from lachesis.tiny_model import build
from tests.harness.openai_endpoint import serving


def test_it_is_the_version_that_the_patches_were_written_for():
    assert importlib.metadata.version("atroposlib") == atropos_patches.ATROPOS_VERSION


def test_a_chat_template_gives_ids(monkeypatch):
    monkeypatch.setattr(
        PreTrainedTokenizerBase, "apply_chat_template", PreTrainedTokenizerBase.apply_chat_template
    )
    atropos_patches.restore_template_default()
    tokenizer, messages = build.build_tokenizer(), [{"role": "user", "content": "a"}]
    assert tokenizer.apply_chat_template(messages) == tokenizer.encode("<|user|>a<|end|>")
    assert "input_ids" in tokenizer.apply_chat_template(messages, return_dict=True)


def test_servers_are_those_of_the_configuration_whatever_is_said_of_slurm(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    monkeypatch.setattr(ServerManager, "__init__", ServerManager.__init__)
    configs = [
        APIServerConfig(
            base_url="http://127.0.0.1:9/v1", api_key="k", model_name="m", health_check=False
        )
    ] * 2
    with pytest.raises(KeyError, match="SLURM_JOB_NODELIST"):
        ServerManager(configs, slurm=True)
    atropos_patches.ignore_slurm()
    for manager in (
        ServerManager(configs, slurm=True),
        ServerManager(configs, APIServer, True),
        ServerManager(configs),
    ):
        assert [server.config.base_url for server in manager.servers] == [
            "http://127.0.0.1:9/v1"
        ] * 2


class Stepping:
    """As much of an environment as looks at the trainer's step."""

    def __init__(self, interval):
        self.config = SimpleNamespace(steps_per_eval=0, min_items_sent_before_logging=100)
        self.checkpoint_interval, self.items_sent_this_step, self.curr_step, self.eval_runner = (
            interval,
            0,
            0,
            None,
        )
        self.saved: list[int] = []

    def save_checkpoint(self, step):
        self.saved.append(step)

    async def see(self, *steps):
        for step in steps:
            self.status_dict = {"current_step": step}
            await BaseEnv.env_step_checks(self)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("every", "steps", "due"),
    [
        (3, [1, 2, 3, 4, 5, 6], [3, 6]),
        (3, [3, 6, 7], [3, 6]),
        (3, [2, 5, 10], [5, 10]),
        (1, [1, 2, 2, 3], [1, 2, 3]),
        (0, [1, 2], []),
        (-1, [1, 2], []),
        (5, [4, 4, 4], []),
    ],
)
async def test_a_checkpoint_comes_whenever_it_is_due(monkeypatch, every, steps, due):
    monkeypatch.setattr(BaseEnv, "env_step_checks", BaseEnv.env_step_checks)
    atropos_patches.save_checkpoints_when_due()
    env = Stepping(every)
    await env.see(*steps)
    assert env.saved == [step // every * every for step in due]


async def test_the_first_group_does_not_wait_for_other_environments(monkeypatch):
    monkeypatch.setattr(base, "asyncio", asyncio)
    atropos_patches.skip_registration_pause()
    begun = asyncio.Event()

    class Manager:
        last_loop_time = None

        async def get_status(self):
            begun.set()
            raise asyncio.CancelledError

        def __getattr__(self, name):
            return AsyncMock()

    manager = asyncio.create_task(BaseEnv.env_manager(Manager()))  # type: ignore[arg-type]
    await asyncio.wait_for(begun.wait(), atropos_patches.REGISTRATION_PAUSE_S - 1)
    await asyncio.wait({manager})


async def test_single_rollouts_keep_what_they_hold(monkeypatch):
    monkeypatch.setattr(BaseEnv, "collect_trajectories", BaseEnv.collect_trajectories)
    atropos_patches.keep_logprobs()
    made = iter(range(10))

    class Single:
        config = SimpleNamespace(group_size=2)

        async def collect_trajectory(self, item):
            number = next(made)
            marked = (
                {"overrides": {"zero": "bad"}, "group_overrides": {"a": 1}}
                if number
                else {"ref_logprobs": [0.0]}
            )
            rollout = {
                "tokens": [number],
                "masks": [number],
                "scores": 0.5,
                "inference_logprobs": [-1.0 - number],
                **marked,
            }
            return rollout, [f"{item} again"] if number else []

    group, backlog = await BaseEnv.collect_trajectories(Single(), "item")  # type: ignore[arg-type]
    assert group == {
        "tokens": [[0], [1]],
        "masks": [[0], [1]],
        "scores": [0.5, 0.5],
        "inference_logprobs": [[-1.0], [-2.0]],
        "overrides": [{}, {"zero": "bad"}],
        "group_overrides": {"a": 1},
    }
    assert backlog == ["item again"]

    class Empty(Single):
        async def collect_trajectory(self, item: str) -> Any:
            return None, []

    with pytest.raises(ValueError, match="a ScoredDataItem for each rollout"):
        await BaseEnv.collect_trajectories(Empty(), "item")  # type: ignore[arg-type]


async def test_the_token_goes_to_the_server_of_the_run_only(monkeypatch):
    """And out of the environment's sight: not into its configuration, nor to a child that it
    starts.
    """
    monkeypatch.setattr(ServerManager, "__init__", ServerManager.__init__)
    with serving() as ours, serving() as other:
        monkeypatch.setenv("LACHESIS_INFERENCE_URL", ours.url.removesuffix("/v1"))
        monkeypatch.setenv("LACHESIS_INFERENCE_TOKEN", "run-token")
        assert atropos_patches.install_inference_token() == (
            ours.url.removesuffix("/v1"),
            "run-token",
        )
        configs = [
            APIServerConfig(base_url=url, api_key="k", model_name="right")
            for url in (ours.url, other.url)
        ]
        for server in ServerManager(configs).servers:
            await server.openai.chat.completions.create(
                model="right", messages=[{"role": "user", "content": "1+1="}]
            )
        assert (ours.keys, other.keys) == ({"Bearer run-token"}, {"Bearer k"})
        assert [config.api_key for config in configs] == ["k", "k"]
        assert "LACHESIS_INFERENCE_TOKEN" not in os.environ
