"""Patch Atropos in the child that runs an environment, and nowhere else.

Everything here was written for version `ATROPOS_VERSION`; a test fails when another one is
installed.

Its library is archived, so these faults will not be mended there; no file of it is changed.

    chat template     since transformers 5, `apply_chat_template` returns a dict where environments
                      expect ids
    server's key      is printed to the log with the configuration, so the environment gets none
    checkpoints       are skipped when the step advances by more than one, or written at every step
    the first group   starts five seconds late, in case other environments register meanwhile
    log-probabilities are dropped by the method that collects single rollouts
    Slurm             an environment that asks for the servers of a Slurm job fails without one

Evaluations run when the trainer asks for them
(`lachesis.environment_process.requested_evaluations`): Atropos skips them when the step advances by
more than one, stops training meanwhile, and does not report that one has raised. Other traps are
avoided elsewhere: the YAML names the server twice (`lachesis.config.run_config`); the API is reset
before the trainer registers (`lachesis.trainer.rollout_client`), guarded against groups that would
block it (`lachesis.rollout_api.routes`), and logs to a file (`lachesis.supervision`); scores that
are not numbers are dropped before they are sent (`lachesis.environment_process.rollout_counters`);
duplicated end-of-turn tokens are removed in `lachesis.rollout_api.scored_group`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import types
from typing import TYPE_CHECKING, Any

from lachesis.base.secrets import remember_secret
from lachesis.environment_process import lazy_imports

if TYPE_CHECKING:
    from atroposlib.envs.base import BaseEnv, Item, ScoredDataGroup
    from transformers import PreTrainedTokenizerBase

ATROPOS_VERSION = "0.4.0"


def apply_atropos_patches() -> None:
    """Apply all patches except the inference token, which only runs have."""
    lazy_imports.load_tokenizers_without_torch()
    restore_template_default()
    ignore_slurm()
    save_checkpoints_when_due()
    keep_logprobs()
    skip_registration_pause()


def restore_template_default() -> None:
    """Make `return_dict=False` the default of `apply_chat_template`, as before transformers 5."""
    from transformers import PreTrainedTokenizerBase

    original = PreTrainedTokenizerBase.apply_chat_template

    @functools.wraps(original)
    def apply_chat_template(self: PreTrainedTokenizerBase, *args: object, **options: object) -> Any:
        options.setdefault("return_dict", False)
        return original(self, *args, **options)

    PreTrainedTokenizerBase.apply_chat_template = apply_chat_template


def ignore_slurm() -> None:
    """Use the servers of the configuration, whatever an environment's class says about Slurm.

    Files written for Atropos have `slurm=True` as a default of their class. Atropos' commands
    replace it by the configuration's value, but a check creates the object itself. No service of a
    run is at an address that Slurm would name.
    """
    from atroposlib.envs.server_handling.server_manager import ServerManager

    original_init = ServerManager.__init__
    signature = inspect.signature(original_init)

    @functools.wraps(original_init)
    def without_slurm(*values: object, **options: object) -> None:
        bound = signature.bind(*values, **options)
        bound.arguments["slurm"] = False
        original_init(*bound.args, **bound.kwargs)

    ServerManager.__init__ = without_slurm


def install_inference_token() -> tuple[str, str] | None:
    """Send the token to the run's inference server only; return its URL and token, or None.

    The token is set on the client, because environments print and log their configuration.
    """
    # Removed from the environment's variables, so that its own children do not inherit the token.
    url, token = (
        os.environ.pop("LACHESIS_INFERENCE_URL", ""),
        os.environ.pop("LACHESIS_INFERENCE_TOKEN", ""),
    )
    if not token:
        return None
    remember_secret(token)
    from atroposlib.envs.server_handling.server_manager import ServerManager

    original_init = ServerManager.__init__

    @functools.wraps(original_init)
    def with_token(self: ServerManager, configs: Any, *values: Any, **options: Any) -> None:
        """Add the token of the run to each server whose address is that of the run."""

        def add_token(server_config: Any) -> Any:
            if f"{getattr(server_config, 'base_url', None)}/".startswith(f"{url}/"):
                return server_config.model_copy(update={"api_key": token})
            return server_config

        original_init(
            self,
            [add_token(server_config) for server_config in configs]
            if isinstance(configs, list)
            else add_token(configs),
            *values,
            **options,
        )

    ServerManager.__init__ = with_token
    return url, token


def label_groups(name: str) -> None:
    """Mark each group with the name of its environment."""
    from atroposlib.envs.base import BaseEnv

    original = BaseEnv._send_scored_data_to_api

    @functools.wraps(original)
    async def _send_scored_data_to_api(self: BaseEnv, scored_data: ScoredDataGroup) -> Any:
        for group in scored_data if isinstance(scored_data, list) else [scored_data]:
            group["group_overrides"] = {**(group.get("group_overrides") or {}), "environment": name}
        return await original(self, scored_data)

    BaseEnv._send_scored_data_to_api = _send_scored_data_to_api


def save_checkpoints_when_due() -> None:
    """Save a checkpoint if the interval was reached or passed since the last check."""
    from atroposlib.envs.base import BaseEnv

    original = BaseEnv.env_step_checks

    @functools.wraps(original)
    async def env_step_checks(self: BaseEnv) -> None:
        previous_step, current_step = self.curr_step, self.status_dict["current_step"]
        await original(self)
        if _is_checkpoint_missed(previous_step, current_step, self.checkpoint_interval):
            self.save_checkpoint(
                current_step // self.checkpoint_interval * self.checkpoint_interval
            )

    BaseEnv.env_step_checks = env_step_checks


# The length of that pause, by which it is recognised.
REGISTRATION_PAUSE_S = 5


def skip_registration_pause() -> None:
    """Skip the pause for other environments to register; the API knows how many a run has."""
    from atroposlib.envs import base

    class AsyncioWithoutPause(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(asyncio, name)

        @staticmethod
        async def sleep(seconds: float) -> None:
            await asyncio.sleep(0 if seconds == REGISTRATION_PAUSE_S else seconds)

    # Only this module's name `asyncio` is replaced; all others keep the real one.
    setattr(base, "asyncio", AsyncioWithoutPause("asyncio"))  # noqa: B010 - what the module imports is not declared


OPTIONAL_ROLLOUT_FIELDS = ("advantages", "ref_logprobs", "inference_logprobs", "messages", "images")


def keep_logprobs() -> None:
    """Collect the rollouts of `collect_trajectory` with all their fields."""
    from atroposlib.envs.base import BaseEnv, ScoredDataGroup

    async def collect_trajectories(self: BaseEnv, item: Item) -> tuple[Any, list[Any]]:
        """Collect the rollouts of a group, and keep every field that all of them have."""
        results = await asyncio.gather(
            *(self.collect_trajectory(item) for _ in range(self.config.group_size))
        )
        rollouts = [rollout for rollout, _ in results]
        if not all(isinstance(rollout, dict) for rollout in rollouts):
            raise ValueError("collect_trajectory() must return a ScoredDataItem for each rollout")
        group = ScoredDataGroup(
            **{
                name: [rollout[name] for rollout in rollouts]
                for name in ("tokens", "masks", "scores")
            }
        )
        for name in OPTIONAL_ROLLOUT_FIELDS:
            if all(rollout.get(name) is not None for rollout in rollouts):
                # A field that only some rollouts have cannot be aligned with the others.
                group[name] = [rollout[name] for rollout in rollouts]
        group["overrides"] = [rollout.get("overrides") or {} for rollout in rollouts]
        group["group_overrides"] = {
            key: value
            for rollout in rollouts
            for key, value in (rollout.get("group_overrides") or {}).items()
        }
        return group, [backlog_item for _, backlog in results for backlog_item in backlog]

    BaseEnv.collect_trajectories = collect_trajectories


def _is_checkpoint_missed(previous_step: int, current_step: int, interval: int) -> bool:
    """Return whether Atropos, which compares remainders, misses a checkpoint between two steps."""
    return (
        interval > 0
        and current_step // interval > previous_step // interval
        # Atropos has saved one in this case.
        and not previous_step % interval > current_step % interval
    )
