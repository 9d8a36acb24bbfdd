"""Start a service, wait until it is ready, or run it to its end, each as a task."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from lachesis.runs.store import RunStore
from lachesis.supervision.readiness import wait_until_ended, wait_until_healthy
from lachesis.supervision.running_services import ServiceGroup
from lachesis.supervision.services.spec import ServiceSpec
from lachesis.tiny_model import build
from tasks.run_as_task import run_as_task

log = logging.getLogger("lachesis.flow")


@task(task_run_name="start {spec.name}", cache_policy=NO_CACHE)
def start_service(group: ServiceGroup, spec: ServiceSpec, store: RunStore, run_id: str) -> int:
    """Start the service and return its process id."""
    pid = group.start(spec)
    store.update_service(
        run_id, spec.name, pid=pid, port=spec.port, log=str(spec.log), state="starting"
    )
    port_text = f" and port {spec.port}" if spec.port else ""
    log.info("%s was started with process id %d%s", spec.name, pid, port_text)
    return pid


def wait_for_service(
    group: ServiceGroup,
    spec: ServiceSpec,
    store: RunStore,
    run_id: str,
    needs: list[str] | None = None,
    on_poll: Callable[[], None] | None = None,
) -> float:
    """Wait until the service is ready, and return the seconds it took; see `wait_until_healthy`."""

    def wait() -> float:
        waited_s = wait_until_healthy(group, spec, needs, on_poll=on_poll)
        command = f"; `{spec.log_command}` shows its log" if spec.log_command else ""
        log.info("%s is healthy after %.1f s%s", spec.name, waited_s, command)
        store.update_service(run_id, spec.name, state="running")
        return waited_s

    return float(run_as_task(f"wait until {spec.name} is healthy", wait))


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
        run_as_task("build tiny model", lambda: wait_until_ended(group, spec, needs=[]))
