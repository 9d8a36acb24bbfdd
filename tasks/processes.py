"""Start a service, wait until it is ready, or run it to its end, each as a task."""

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
    """Start the service and return its process id."""
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
    """Wait until the service is ready, and return the seconds it took; see `wait_until_healthy`."""
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
    """Wait until a process has ended; a task, so that Prefect shows it. See `wait_until_ended`."""
    wait_until_ended(group, spec, needs, on_poll=on_poll)


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
        wait_for_end(group, spec, needs=[])
