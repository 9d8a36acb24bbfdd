"""Publish progress and reports of a run in the Prefect UI.

A server that does not respond costs a few seconds and never the run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from pathlib import Path

from prefect import runtime, task
from prefect.cache_policies import NO_CACHE

from lachesis.base.errors import ServerDownError
from lachesis.inference_tests.results import read_samples
from lachesis.inference_tests.store import InferenceTest, InferenceTestStore
from lachesis.monitor import artifacts
from lachesis.monitor.publish import OVERVIEW_KIND, make_overview_key
from lachesis.monitor.run_health import judge_ended_run
from lachesis.monitor.tick import Monitor
from lachesis.prefect_client.resources import PrefectApi
from lachesis.runs.store import RunStore
from lachesis.web.serving import find_page_server

log = logging.getLogger("lachesis.flow")


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
def publish_validation(
    tests: InferenceTestStore, test: InferenceTest, flow_run_id: str | None
) -> None:
    """Publish the verdict, the table of models, and the answers as artifacts of the validation."""
    if flow_run_id is None:
        return
    samples = {
        model: read_samples(tests.get_samples_file(test, model)) for model in test.request.models
    }
    try:
        api = PrefectApi()
        for kind, data in (
            ("markdown", artifacts.render_validation(test, samples)),
            ("table", json.dumps(artifacts.make_model_rows(test))),
        ):
            api.create_artifact(
                flow_run_id, key=f"validation-{kind}-{test.test_id}", kind=kind, data=data
            )
        publish_page_link(tests.home, f"tests/{test.test_id}", flow_run_id)
    except ServerDownError as error:
        log.warning("the validation was not published: %s", error)


def record_final_judgement(store: RunStore, run_id: str) -> None:
    """Write the judgement of a run that has just ended into its record; no server is needed."""
    judge_ended_run(store, store.load(run_id))


@task(task_run_name="write report", cache_policy=NO_CACHE)
def publish_report(store: RunStore, run_id: str) -> None:
    """Publish the report of a run that has ended."""
    try:
        Monitor(store).publish_report(run_id)
        log.info("the report is among the artifacts of this run")
    except ServerDownError as error:
        log.warning("the report was not published: %s", error)


def renew_report(store: RunStore, run_id: str) -> None:
    """Publish the report of a run that trains; a server that is away is no fault of the run."""
    with contextlib.suppress(ServerDownError):
        Monitor(store).publish_report(run_id)


def publish_page_link(home: Path, path: str, flow_run_id: str) -> None:
    """Publish a link to a page among the artifacts of a flow run, if the pages are served.

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
        PrefectApi().create_artifact(
            flow_run_id,
            key=f"page-{name}",
            kind="markdown",
            data=f"[The page of {name}]({link})",
            description="Its page; `lachesis ui` prints a link that signs a browser in.",
        )


def log_addresses(store: RunStore, run_id: str, flow_run_id: str) -> None:
    """Log where the run can be watched; Prefect's pages make links of the addresses.

    The report is published first, because the address of an artifact has its id.
    """
    publish_page_link(store.home, f"runs/{run_id}", flow_run_id)
    renew_report(store, run_id)
    with contextlib.suppress(ServerDownError):
        api = PrefectApi()
        artifact_ids = {
            "report with curves": api.find_artifact(f"report-{run_id}", "markdown", flow_run_id),
            "all runs": api.find_artifact(make_overview_key(store.home), OVERVIEW_KIND),
        }
        pages = f"{api.url.removesuffix('/api')}/artifacts/artifact"
        for title, artifact_id in artifact_ids.items():
            if artifact_id is not None:
                log.info("%s: %s/%s", title, pages, artifact_id)
