"""Serve the model of a run over an API like OpenAI's, as long as a block lasts.

The tiny model is built in a child too, when it is first needed.
"""

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from lachesis.checkpoints.manifests import Checkpoints, Manifest
from lachesis.config import run_config
from lachesis.config.run_config import RunConfig
from lachesis.runs.folder import RunDir
from lachesis.runs.record import RunRecord
from lachesis.runs.store import read_effective_config
from lachesis.supervision import leftovers
from lachesis.supervision.readiness import wait_until_ended, wait_until_healthy
from lachesis.supervision.running_services import ServiceGroup
from lachesis.supervision.services.inference_test import make_base_model_plan
from lachesis.supervision.services.plan import ServicePlan, with_env
from lachesis.supervision.services.spec import ServiceSpec
from lachesis.tiny_model import build

# The checkpoint that means the model before training.
BASE = "base"
TOKEN_VARIABLE = "LACHESIS_INFERENCE_TOKEN"


@dataclass(frozen=True)
class ModelEndpoint:
    """Hold the address and the name of a served model."""

    url: str
    """The address that clients of OpenAI's API call their base URL."""
    token: str
    model: str
    """The name of the base model, which a request names."""
    step: int | None
    """The step of the weights; None for the base model."""

    @property
    def description(self) -> str:
        if self.step is None:
            return "the base model"
        return f"the weights of step {self.step}"


def select_checkpoint(run_dir: RunDir, checkpoint: str) -> Manifest | None:
    """Return the checkpoint that `best`, `last` or a step names; None for `base`.

    Raises:
        RunStateError: There is no such checkpoint.
        CheckpointError: Its files are damaged.
    """
    if checkpoint == BASE:
        return None
    return Checkpoints(run_dir.checkpoints).select(checkpoint)


@contextlib.contextmanager
def serve_run_model(
    record: RunRecord,
    run_dir: RunDir,
    manifest: Manifest | None,
    *,
    port: int | None = None,
    token: str | None = None,
) -> Iterator[ModelEndpoint]:
    """Serve the weights of a checkpoint, or the base model, and yield the address.

    The run itself is not changed, and may be alive.

    Args:
        record: The record of the run.
        run_dir: The folder of the run.
        manifest: The checkpoint; None for the base model.
        port: The port to serve on, by default a free one.
        token: The token that requests need, by default a new one.

    Raises:
        ProcessExitedError: A process has died; the message has its last lines.
        HealthTimeoutError: A process was not ready in time.
    """
    leftovers.remove_old_checks()
    folder = Path(tempfile.mkdtemp(prefix=f"{leftovers.CHECK_PREFIX}{record.run_id}-"))
    try:
        config = _make_serving_config(run_dir)
        plan = make_base_model_plan(
            config,
            folder,
            record.seed,
            weights=manifest.sampler_weights if manifest else None,
            engine_store=run_dir.engine,
            port=port,
            with_engine=config.has_own_engine,
        )
        if token:
            plan = _replace_token(plan, token)
        plan.write_files()
        with ServiceGroup() as group:
            # Both load at once; the server needs the engine last.
            for spec in plan.services:
                group.start(spec)
            for spec in plan.services:
                wait_until_healthy(group, spec)
            yield ModelEndpoint(
                url=f"{plan.trainer_url}/v1",
                token=plan.client_env[TOKEN_VARIABLE],
                model=record.base_model,
                step=manifest.step if manifest else None,
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _make_serving_config(run_dir: RunDir) -> RunConfig:
    """Return the run's configuration for a process that trains nothing."""
    values = read_effective_config(run_dir).model_dump()
    # Nothing is trained, so nothing is logged, and no further environment takes part.
    values["tinker"]["use_wandb"] = values["env"]["use_wandb"] = False
    values["env"]["mixture"] = {}
    return run_config.build_run_config(values)


def _replace_token(plan: ServicePlan, token: str) -> ServicePlan:
    *engines, server = plan.services
    return replace(
        plan,
        services=[*engines, with_env(server, {TOKEN_VARIABLE: token})],
        client_env={**plan.client_env, TOKEN_VARIABLE: token},
    )


def is_missing_tiny_model(model: str, home: Path) -> bool:
    """Return whether `model` is this project's tiny model and still has to be built."""
    return (
        Path(model) == build.get_tiny_model_path(build.TinyModelRecipe(), home)
        and not Path(model).is_dir()
    )


def build_tiny_model(home: Path, folder: Path) -> None:
    """Build the tiny model in a child, because this process must not load torch.

    If another process is building it, wait for that.
    """
    spec = ServiceSpec(
        "model",
        [sys.executable, "-P", "-m", "lachesis.cli.main", "model", "build"],
        log=folder / "logs" / "model.log",
        cwd=folder,
        env={"LACHESIS_HOME": str(home)},
        timeout_s=600.0,
    )
    with ServiceGroup() as group:  # A separate group, because no service of a run may end.
        group.start(spec)
        wait_until_ended(group, spec, needs=[])
