"""Try an environment before training: run the stages without a model, and serve a base model."""

import functools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lachesis.base.errors import LachesisError, StageError
from lachesis.base.files import write_private
from lachesis.base.json_text import Json
from lachesis.config import run_config
from lachesis.config.run_config import RunConfig
from lachesis.environment_process.model_free_check import STAGE_NAMES
from lachesis.supervision.readiness import MAX_LOG_SIZE_TEXT, is_log_too_large, wait_until_healthy
from lachesis.supervision.running_services import ServiceGroup
from lachesis.supervision.services.inference_test import make_base_model_plan, make_stage_check_spec
from lachesis.supervision.services.plan import ServicePlan

TIMEOUT_S = {"import": 120.0, "config": 60.0, "dataset": 300.0, "model-free check": 120.0}
POLL_S = 0.05


class StageChild:
    """Run the stages that need no model in a child, which starts at once."""

    def __init__(
        self, group: ServiceGroup, file: str, class_name: str, config: RunConfig, folder: Path
    ) -> None:
        self.group, self.results_file = group, folder / "stages.jsonl"
        self.results_file.unlink(missing_ok=True)
        self.spec, files = make_stage_check_spec(
            file, class_name, config, folder, self.results_file
        )
        for path, text in files.items():
            write_private(path, text)
        group.start(self.spec)

    def wait_for_stage(self, stage: str, timeout_s: float | None = None) -> Json:
        """Wait for the result of a stage and return it.

        Raises:
            StageError: The stage failed, hangs, or ended the child.
        """
        timeout_s = timeout_s or TIMEOUT_S[stage]
        until = time.monotonic() + timeout_s
        while (line := self._read_stage_line(stage)) is None:
            if not self.group.is_running(self.spec.name) and self._read_stage_line(stage) is None:
                try:
                    self.group.require_running(self.spec.name)
                except LachesisError as error:
                    raise StageError(str(error), stage=stage) from error
            if is_log_too_large(self.spec):
                raise StageError(
                    f"it printed more than {MAX_LOG_SIZE_TEXT} and was killed, see {self.spec.log}",
                    stage=stage,
                )
            if time.monotonic() > until:
                raise StageError(
                    f"it was not done after {timeout_s:.0f} s, see {self.spec.log}", stage=stage
                )
            time.sleep(POLL_S)
        if not line["ok"]:
            raise StageError(f"{line['error']} (see {self.spec.log})", stage=stage)
        return line

    def _read_stage_line(self, stage: str) -> Json | None:
        """Return the result of a stage; None until its line is complete."""
        index = STAGE_NAMES.index(stage)
        try:
            # A line without a line feed is still being written.
            lines = self.results_file.read_text(encoding="utf-8").split("\n")[:-1]
        except FileNotFoundError:
            return None
        if len(lines) <= index:
            return None
        content: Json = json.loads(lines[index])
        return content


@dataclass(frozen=True)
class StageResult:
    """Hold how one stage without a model ended."""

    name: str
    status: Literal["passed", "failed", "not offered"]
    seconds: float
    message: str
    """Why it failed, or what the environment does not offer; else empty."""
    detail: Json
    """Holds the results of the stage; empty if the stage could not be finished."""
    is_last: bool = False
    """Whether the stages after it cannot be run."""


def run_stages(
    child: StageChild, show_step: Callable[[str, Callable[[], Json]], Json]
) -> Iterator[StageResult]:
    """Yield the result of each stage without a model, until one cannot be finished.

    Args:
        child: The child that runs the stages.
        show_step: Called with the name of each stage and the function that waits for it.
    """
    for name in STAGE_NAMES:
        started = time.monotonic()
        try:
            line = show_step(name, functools.partial(child.wait_for_stage, name))
        except LachesisError as error:
            seconds = time.monotonic() - started
            yield StageResult(name, "failed", seconds, str(error), {}, is_last=True)
            return
        detail, seconds = line.get("detail") or {}, time.monotonic() - started
        if detail.get("faults"):
            yield StageResult(name, "failed", seconds, "; ".join(detail["faults"]), detail)
        elif detail.get("offered") is False:
            missing = f"the class has no {', '.join(detail['missing'])}"
            yield StageResult(name, "not offered", seconds, missing, detail)
        else:
            yield StageResult(name, "passed", seconds, "", detail)


def serve_base_model(
    group: ServiceGroup, config: RunConfig, model: str, folder: Path, *, with_engine: bool = True
) -> ServicePlan:
    """Serve a model, untrained, as long as the group lasts, and wait until it is ready.

    With `with_engine` an engine of this machine samples, else the Tinker server that the variables
    of this process name.

    Raises:
        ProcessExitedError: A process has died.
        HealthTimeoutError: The server was not ready in time.
    """
    folder.mkdir(exist_ok=True)
    values = config.model_dump()
    values["env"]["tokenizer_name"] = values["openai"]["model_name"] = model
    plan = make_base_model_plan(
        run_config.build_run_config(values), folder, with_engine=with_engine
    )
    plan.write_files()
    # Both start at once: the server takes as long to load as the engine, which it needs last.
    for spec in plan.services:
        group.start(spec)
    for spec in plan.services:
        wait_until_healthy(group, spec)
    return plan
