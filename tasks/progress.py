"""Show on Prefect's pages how a run proceeds: progress, verdict, link, and log lines of steps."""

import contextlib
import logging
import time
from pathlib import Path

from prefect import runtime, task
from prefect.cache_policies import NO_CACHE

from lachesis.base.errors import ServerDownError
from lachesis.base.json_text import Json
from lachesis.inference_tests.store import InferenceTest, InferenceTestStore
from lachesis.monitor.prefect_artifacts import publish_test
from lachesis.monitor.tick import Monitor
from lachesis.prefect_client.resources import PrefectApi
from lachesis.reporting.inference_test_view import InferenceTestView
from lachesis.runs.folder import RunDir
from lachesis.runs.held_out_results import build_held_out_curve, describe_newest
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore
from lachesis.web.server import find_page_server

log = logging.getLogger("lachesis.flow")


# Seconds between two verdicts on a run that trains.
VERDICT_INTERVAL_S = 30.0


class TrainingProgress:
    """Show how far a training is: a ring on the bar of the task, log lines, the verdict."""

    def __init__(self, store: RunStore, record: RunRecord, flow_run_id: str | None) -> None:
        self.store, self.record, self.flow_run_id = store, record, flow_run_id
        self._step_log = StepLog(store.dir(record.run_id), record.total_steps)
        self._ring: ProgressArtifact | None = None
        self._verdict_published_at = -VERDICT_INTERVAL_S

    def update(self, step: int, total: int) -> None:
        """Show the step; call this often. A server that is away is no fault of the run."""
        if self._ring is None:  # The task has begun.
            self._ring = ProgressArtifact(self.record.run_id, self.flow_run_id)
            if self.flow_run_id is not None:
                page = f"runs/{self.record.run_id}"
                publish_page_link(self.store.home, page, self.flow_run_id)
                self.record = renew_verdict(self.store, self.record)
        self._ring.publish(step, total, force=step == total)
        now = time.monotonic()
        if self._step_log.update() and now - self._verdict_published_at >= VERDICT_INTERVAL_S:
            self._verdict_published_at = now
            self.record = renew_verdict(self.store, self.record)

    def finish(self) -> None:
        """Log the last step if it was not logged."""
        self._step_log.finish()


class ProgressArtifact:
    """Publish the progress of one run, at most once every few seconds."""

    INTERVAL_S = 3.0

    def __init__(self, run_id: str, flow_run_id: str | None) -> None:
        self.run_id, self.flow_run_id = run_id, flow_run_id
        self._artifact_id: str | None = None
        # The page shows the artifact as a ring on the bar of the task.
        self._task_run_id: str | None = runtime.task_run.id
        self._published_at = 0.0

    def publish(self, step: int, total: int, *, force: bool = False) -> None:
        """Publish the progress, unless it was published just before."""
        if self.flow_run_id is None or (
            time.monotonic() - self._published_at < self.INTERVAL_S and not force
        ):
            return
        self._published_at = time.monotonic()
        try:
            data = round(100 * step / total, 1)
            key = f"progress-{self.run_id}"
            self._artifact_id = PrefectApi().upsert_artifact(
                self.flow_run_id,
                key=key,
                kind="progress",
                data=data,
                description="Training steps",
                artifact_id=self._artifact_id,
                task_run_id=self._task_run_id,
            )
        except ServerDownError as error:
            log.warning("the progress was not published: %s", error)


@task(task_run_name="publish verdict", cache_policy=NO_CACHE)
def publish_test_verdict(
    tests: InferenceTestStore, test: InferenceTest, flow_run_id: str | None
) -> None:
    """Publish the verdict on a test, and the link to its page, as artifacts of its flow run."""
    if flow_run_id is None:
        return
    try:
        publish_test(InferenceTestView(test, tests), flow_run_id)
        publish_page_link(tests.home, f"tests/{test.test_id}", flow_run_id)
    except ServerDownError as error:
        log.warning("the verdict was not published: %s", error)


@task(task_run_name="publish verdict", cache_policy=NO_CACHE)
def publish_run_verdict(store: RunStore, run_id: str) -> None:
    """Publish the verdict on a run that has ended."""
    try:
        Monitor(store).publish_verdict(store.load(run_id))
        log.info("the verdict is among the artifacts of this run")
    except ServerDownError as error:
        log.warning("the verdict was not published: %s", error)


def renew_verdict(store: RunStore, record: RunRecord) -> RunRecord:
    """Publish the verdict on a run that trains, and return its record as it is now.

    A server that is away is no fault of the run.
    """
    with contextlib.suppress(ServerDownError):
        return Monitor(store).publish_verdict(record)
    return record


def publish_page_link(home: Path, path: str, flow_run_id: str) -> None:
    """Publish a link to a page among the artifacts of a flow run, if the pages are served.

    Prefect makes a link of the address in the log too.

    Args:
        home: The home whose pages they are.
        path: The path of the page, `runs/ID` or `tests/ID`.
        flow_run_id: The flow run.
    """
    address = find_page_server(home)
    if address is None:
        return
    link, name = f"{address}/{path}", path.rpartition("/")[2]
    log.info("its page: %s", link)
    with contextlib.suppress(ServerDownError):
        PrefectApi().upsert_artifact(
            flow_run_id,
            key=f"page-{name}",
            kind="markdown",
            data=f"[The page of {name}]({link})",
            description="Its page; `lachesis ui` prints a link that signs a browser in.",
        )


MAX_LINES = 30
FIRST_PAUSE_S = 30.0
# After so many lines the pause is twice as long.
LINES_PER_PAUSE = 6
TAIL_STEPS = 60


class StepLog:
    """Log the steps of one attempt of a run."""

    def __init__(self, folder: RunDir, total_steps: int) -> None:
        """Begin after the steps that earlier attempts of the run have made."""
        self._metrics, self.total_steps = MetricsFile(folder.metrics), total_steps
        self._last_step = max((int(line["step"]) for line in self._metrics.tail(1)), default=0)
        self._num_lines, self._logged_step = 0, self._last_step
        self._logged_at = time.monotonic()

    def update(self) -> bool:
        """Log the new steps that are worth a line, and return whether there were any."""
        lines = self._metrics.tail(TAIL_STEPS)
        num_lines_before = self._num_lines
        for index, line in enumerate(lines):
            if line["step"] <= self._last_step:
                continue
            self._last_step = int(line["step"])
            if self._is_worth_a_line(self._last_step):
                self._log_step(lines[: index + 1])
        return self._num_lines > num_lines_before

    def finish(self) -> None:
        """Log the last step if it was not logged."""
        lines = self._metrics.tail(TAIL_STEPS)
        if lines and int(lines[-1]["step"]) > self._logged_step:
            self._log_step(lines)

    def _is_worth_a_line(self, step: int) -> bool:
        if self._num_lines >= MAX_LINES:
            return False
        pause_s = FIRST_PAUSE_S * 2 ** (self._num_lines // LINES_PER_PAUSE)
        return is_milestone(step) or time.monotonic() - self._logged_at >= pause_s

    def _log_step(self, lines: list[Json]) -> None:
        """Log the last of these lines of metrics."""
        self._num_lines += 1
        self._logged_at, self._logged_step = time.monotonic(), int(lines[-1]["step"])
        log.info("%s", describe_step(lines, self.total_steps))


def is_milestone(step: int) -> bool:
    """Return whether a step is 1, 2 or 5 times a power of ten."""
    return str(step).rstrip("0") in ("1", "2", "5")


def describe_step(lines: list[Json], total_steps: int) -> str:
    """Describe the last of these lines of metrics, with the newest held-out result."""
    line = lines[-1]
    parts = [f"step {line['step']} of {total_steps}"]
    if line.get("reward/mean") is not None:
        parts.append(f"reward {line['reward/mean']:.3f}")
    if held_out := describe_newest(build_held_out_curve(lines)):
        parts.append(held_out)
    if line.get("time/step") is not None:
        parts.append(f"{line['time/step']:.1f} s per step")
    tokens = sum(
        line.get(f"tokens/{kind}_total") or 0 for kind in ("prefill", "sampled", "trained")
    )
    parts.append(f"{tokens:,.0f} tokens so far")
    return ", ".join(parts)
