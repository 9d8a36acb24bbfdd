"""Define the four deployments of a home, as people see them on the pages of Prefect.

train     a training run, started by a person, a program, a schedule or an automation
test      a test of an environment before training
monitor   one look at all runs, on a schedule
nightly   tests of all environments, on a schedule that is off by default
"""

import os
from datetime import UTC, datetime, timedelta

from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.deployments.runner import RunnerDeployment
from prefect.schedules import Cron, Interval, Schedule
from pydantic import BaseModel

from lachesis import __version__
from lachesis.base import paths
from lachesis.base.errors import ConfigError
from lachesis.config.launch_spec import LaunchSpec, TestSpec
from lachesis.config.profiles import PROFILES
from lachesis.prefect_client.background_serve import (
    MONITOR_FLOW,
    NIGHTLY_FLOW,
    TEST_FLOW,
    TRAINING_FLOW,
    get_deployment_name,
    read_monitor_interval_s,
)
from lachesis.prefect_client.forms import ENVIRONMENT_PARAMETERS, list_environment_names, make_form
from lachesis.prefect_client.internals import read_parameter_schema, write_parameter_schema

SCHEDULE_ANCHOR = datetime(2026, 1, 1, tzinfo=UTC)
# What people start has this tag; `/v2/runs?tags=lachesis` shows only that.
PEOPLE_TAG, TICK_TAG = "lachesis", "lachesis-tick"
ENTRYPOINTS = {
    TRAINING_FLOW: "flows.train.train",
    TEST_FLOW: "flows.inference_test.inference_test",
    MONITOR_FLOW: "flows.monitor.monitor",
    NIGHTLY_FLOW: "flows.nightly.nightly",
}
SPECS: dict[str, type[BaseModel]] = {TRAINING_FLOW: LaunchSpec, TEST_FLOW: TestSpec}
DESCRIPTIONS = {
    TRAINING_FLOW: """\
Trains a language model on an environment by reinforcement learning, and evaluates it before and
after.

**What to fill in.** Only *Environment*. Every other field may stay empty: then the profile decides.
Fields that the form does not have go into *Settings*, one `key=value` on each line. Do not fill in
*Run id*.

**Where to look.** The page of the flow run: its timeline shows the task `train` while training
lasts, *Logs* the newest steps, *Artifacts* the verdict and a link to the page with the curves. A
flow run that is refused has the state *Refused*, and *Details* says which field is wrong and what
is allowed.

| button | what it does |
|---|---|
| Cancel | saves a checkpoint and stops |
| Suspend | saves a checkpoint and stops, as Cancel does; Retry goes on |
| Retry | continues a failed run from its newest checkpoint |
| Copy to new run | starts a new run with the same parameters |
""",
    TEST_FLOW: """\
Tests an environment before anything is trained on it: imports it, reads its data set, lets models
answer some of its items, and says whether a model can learn from it.

**What to fill in.** Only *Environment*. *Models* are names at an endpoint, or `embedded:NAME` for a
model on this machine; empty: the model that would be trained.

**Where to look.** *Artifacts* of the flow run: the verdict with its evidence, and a link to the
page with the answers of the models.
""",
    MONITOR_FLOW: """\
Looks at every living run once: publishes its progress, names stalls, judges learning, and ends what
dead runs have left. It runs by its own schedule; nobody has to start it.

**Where to look.** `/runs` of `lachesis ui`, or the artifacts of each flow run of `train`.
""",
    NIGHTLY_FLOW: """\
Tests all environments, or those that you name, each as a flow run of `test`.

**What to fill in.** Nothing. `LACHESIS_NIGHTLY="0 3 * * *"` in the environment of `lachesis serve`
switches its schedule on.

**Where to look.** The flow runs of `test`.
""",
}


def make_deployment(
    flow: str,
    *,
    tags: list[str],
    schedule: Schedule | None = None,
    concurrency_limit: ConcurrencyLimitConfig | None = None,
) -> RunnerDeployment:
    """Return the deployment of a flow with its form."""
    deployment = RunnerDeployment.from_entrypoint(
        ENTRYPOINTS[flow],
        name=get_deployment_name(flow, paths.home()),
        description=DESCRIPTIONS[flow],
        version=__version__,
        tags=tags,
        schedule=schedule,
        concurrency_limit=concurrency_limit,
    )
    choices = {"profile": list(PROFILES)}
    if flow in ENVIRONMENT_PARAMETERS:
        choices[ENVIRONMENT_PARAMETERS[flow]] = list_environment_names()
    required = tuple(name for name in choices if name == "environment")
    schema = read_parameter_schema(deployment)
    write_parameter_schema(
        deployment, make_form(schema, choices, spec=SPECS.get(flow), required=required)
    )
    return deployment


def make_training_deployment() -> RunnerDeployment:
    """Return the deployment of training runs."""
    return make_deployment(TRAINING_FLOW, tags=[PEOPLE_TAG])


def make_test_deployment() -> RunnerDeployment:
    """Return the deployment of tests."""
    return make_deployment(TEST_FLOW, tags=[PEOPLE_TAG])


def make_monitor_deployment() -> RunnerDeployment:
    """Return the deployment of the monitor, which runs one tick at a time.

    A tick that would run beside another one, or that piled up while the host slept, is cancelled
    without a process. With a pool limit the piled-up ticks would run one after the other instead.
    The schedule has a fixed slug and anchor, because otherwise each start of the runner would
    create a new one.
    """
    schedule = Interval(
        timedelta(seconds=read_monitor_interval_s()),
        anchor_date=SCHEDULE_ANCHOR,
        timezone="UTC",
        slug="tick",
    )
    one_at_a_time = ConcurrencyLimitConfig(
        limit=1, collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW
    )
    return make_deployment(
        MONITOR_FLOW, tags=[TICK_TAG], schedule=schedule, concurrency_limit=one_at_a_time
    )


def make_nightly_deployment() -> RunnerDeployment:
    """Return the deployment that tests all environments, scheduled by the cron line
    $LACHESIS_NIGHTLY.

    It can also be started by hand.

    Raises:
        ConfigError: The value is not a cron line.
    """
    cron = os.environ.get("LACHESIS_NIGHTLY", "")
    try:
        schedule = Cron(cron or "0 3 * * *", active=bool(cron), slug="nightly")
    except ValueError as error:
        raise ConfigError(
            f"the environment variable LACHESIS_NIGHTLY is {cron!r}, which is not a cron line "
            f"(allowed: five fields, as in '0 3 * * *'): {error}"
        ) from error
    return make_deployment(NIGHTLY_FLOW, tags=[PEOPLE_TAG], schedule=schedule)
