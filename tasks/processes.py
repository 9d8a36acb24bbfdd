"""Tasks around one service: start it, wait until it is healthy, run it to its end."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from lachesis.runs.store import RunStore
from lachesis.supervision.group import ServiceGroup
from lachesis.supervision.health import wait_until_ended, wait_until_healthy
from lachesis.supervision.process import ServiceSpec
from lachesis.tiny_model import build

log = logging.getLogger("lachesis.flow")


@task(task_run_name="start {spec.name}", cache_policy=NO_CACHE)
def start_service(group: ServiceGroup, spec: ServiceSpec, store: RunStore, run_id: str) -> int:
    """Start the service; its process id."""
    pid = group.start(spec)
    store.update_service(
        run_id, spec.name, pid=pid, port=spec.port, log=str(spec.log), state="starting"
    )
    return pid


@task(task_run_name="wait for {spec.name}", cache_policy=NO_CACHE)
def wait_for_service(
    group: ServiceGroup,
    spec: ServiceSpec,
    store: RunStore,
    run_id: str,
    needs: list[str] | None = None,
    on_poll: Callable[[], None] | None = None,
) -> float:
    """Seconds until the service was healthy; fails at once when it dies, or one that it needs
    (default: any), and when `look`, which is called meanwhile, raises.
    """
    waited_s = wait_until_healthy(group, spec, needs, on_poll=on_poll)
    log.info("%s is healthy after %.1f s; its log is %s", spec.name, waited_s, spec.log)
    store.update_service(run_id, spec.name, state="running")
    return waited_s


@task(task_run_name="{spec.name}", cache_policy=NO_CACHE)
def wait_for_end(
    group: ServiceGroup,
    spec: ServiceSpec,
    needs: list[str],
    on_poll: Callable[[], None] | None = None,
) -> None:
    """As `await_end`; a task, so that it is seen."""
    wait_until_ended(group, spec, needs, on_poll=on_poll)


def is_missing_tiny_model(model: str, home: Path) -> bool:
    """Whether `model` is this project's tiny one and still has to be built."""
    return (
        Path(model) == build.get_tiny_model_path(build.TinyModelRecipe(), home)
        and not Path(model).is_dir()
    )


def build_tiny_model(home: Path, folder: Path) -> None:
    """Build it in a child, as this process shall not load torch; another one that builds it is
    waited for.
    """
    spec = ServiceSpec(
        "model",
        [sys.executable, "-P", "-m", "lachesis.cli.main", "model", "build"],
        log=folder / "logs" / "model.log",
        cwd=folder,
        env={"LACHESIS_HOME": str(home)},
        timeout_s=600.0,
    )
    with ServiceGroup() as group:  # of its own: in a group of services nothing may end
        group.start(spec)
        wait_for_end(group, spec, needs=[])
