"""Tasks around one service: start it, wait until it is healthy, run it to its end."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from lachesis import models
from lachesis.errors import HealthTimeoutError
from lachesis.runs import RunStore
from lachesis.supervision.group import ServiceGroup, death
from lachesis.supervision.health import wait_healthy
from lachesis.supervision.process import ServiceSpec

log = logging.getLogger("lachesis.flow")


@task(task_run_name="start {spec.name}", cache_policy=NO_CACHE)
def start_service(group: ServiceGroup, spec: ServiceSpec, store: RunStore, run_id: str) -> int:
    """Start the service; its process id."""
    pid = group.start(spec)
    store.update_service(run_id, spec.name, pid=pid, port=spec.port, log=str(spec.log), state="starting")
    return pid


@task(task_run_name="wait for {spec.name}", cache_policy=NO_CACHE)
def wait_for_service(group: ServiceGroup, spec: ServiceSpec, store: RunStore, run_id: str) -> float:
    """Seconds until the service was healthy; fails at once when it dies."""
    waited = wait_healthy(group, spec)
    log.info("%s is healthy after %.1f s; its log is %s", spec.name, waited, spec.log)
    store.update_service(run_id, spec.name, state="running")
    return waited


@task(task_run_name="{spec.name}", cache_policy=NO_CACHE)
def wait_for_end(group: ServiceGroup, spec: ServiceSpec, needs: list[str]) -> None:
    """As `await_end`."""
    await_end(group, spec, needs)


def await_end(group: ServiceGroup, spec: ServiceSpec, needs: list[str]) -> None:
    """Wait until a process that ends by itself has ended well; fails at once when a service that it needs dies."""
    until = time.monotonic() + spec.timeout_s
    while group.wait(spec.name, timeout_s=1.0) is None and group.running(spec.name):
        for name in needs:
            group.require(name)
        if time.monotonic() > until:
            raise HealthTimeoutError(
                f"{spec.name} has not ended after {spec.timeout_s:.0f} s, see {spec.log}", service=spec.name
            )
    if group.exit_code(spec.name) != 0:
        raise death(spec, group.exit_code(spec.name))


def is_missing_tiny_model(model: str, home: Path) -> bool:
    """Whether `model` is this project's tiny one and still has to be built."""
    return Path(model) == models.tiny_path(models.Recipe(), home) and not Path(model).is_dir()


def build_tiny_model(home: Path, folder: Path) -> None:
    """Build it in a child, as this process shall not load torch; another one that builds it is waited for."""
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
