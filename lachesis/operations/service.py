"""Provide the operations behind the command line and every other interface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lachesis.base.errors import ConfigError, FieldValueError, shorten
from lachesis.base.files import read_last_lines, write_private
from lachesis.base.json_text import Json
from lachesis.config import mixture
from lachesis.config.field_edits import (
    TOP_SECTION,
    ConfigField,
    describe_field,
    get_editable_values,
)
from lachesis.config.launch_spec import LaunchSpec, TestSpec
from lachesis.config.run_config import RunConfig
from lachesis.environment_catalog import lookup as discovery
from lachesis.environment_catalog.scan import ScanResult, scan_environments
from lachesis.inference_tests.store import InferenceTest, InferenceTestStore
from lachesis.launch import choose_model
from lachesis.launch.create_run import create_run, create_test
from lachesis.launch.preview import LaunchPreview, preview_launch
from lachesis.launch.resolve import (
    ResolvedLaunch,
    ResolvedTest,
    check_launch,
    read_launch_fields,
    resolve_at_place,
    resolve_test,
)
from lachesis.launch.resume import prepare_resume
from lachesis.monitor.run_health import refresh_health, refresh_newest_health
from lachesis.prefect_client import background_serve, refresh, submit
from lachesis.prefect_client.resources import PrefectApi
from lachesis.reporting.next_steps import NEXT_STEP_COMMANDS
from lachesis.reporting.run_schemas import RunResults, RunStatus
from lachesis.reporting.run_view import build_run_results, build_run_status, find_log_files
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore, read_effective_config
from lachesis.tiny_model import build


class LachesisService:
    """The operations on one home folder. Its methods raise only LachesisError for errors that a
    user can cause.
    """

    def __init__(
        self, home: Path | None = None, *, schema_timeout_s: float = discovery.SCHEMA_TIMEOUT_S
    ) -> None:
        self.schema_timeout_s = schema_timeout_s
        self.store = RunStore(home)
        self.tests = InferenceTestStore(self.store.home)

    # --- environments

    def list_environments(self) -> ScanResult:
        """Return the environments that can be trained on, and the files that do not parse."""
        return scan_environments()

    def describe(self, spec: LaunchSpec) -> Json:
        """Describe one environment: its fields with the values that this launch would give them.

        The key `problem` says why the launch could not start, or is null.
        """
        launch_fields = read_launch_fields(spec, self.schema_timeout_s)
        problem = None
        try:
            config = launch_fields.build_config(self.store.home)
            errors = launch_fields.find_validation_errors()
            problem = "; ".join(error["message"] for error in errors) or None
            problem = problem or choose_model.find_model_problem(spec, config, self.store.home)
        except ConfigError as error:
            problem = str(error)
            config = launch_fields.build_config(self.store.home, with_edits=False)
        values = config.model_dump()
        values[TOP_SECTION] = values
        for name, value in spec.list_edits().items():
            field = launch_fields.fields.find(name)
            values[field.section][field.name] = launch_fields.fields.parse_value(field, value)
        return {
            **asdict(launch_fields.environment),
            "profile": spec.profile,
            "model": config.openai.model_name,
            "fields": [
                describe_field(field, values) for field in launch_fields.fields.by_name.values()
            ],
            "problem": problem,
            "warning": launch_fields.schema.warning,
        }

    def edit(
        self, spec: LaunchSpec, name: str, value: object
    ) -> tuple[LaunchSpec, ConfigField, Any]:
        """Return the launch with one field changed, that field, and its checked value.

        A combination of fields that cannot work is reported by `describe` and refused by `resolve`.

        Raises:
            UnknownFieldError: There is no such field.
            LockedFieldError: The profile does not let the field be changed.
            FieldValueError: The value has the wrong type, or the environment refuses it.
        """
        launch_fields = read_launch_fields(spec, self.schema_timeout_s)
        base_config = launch_fields.build_config(self.store.home, with_edits=False)
        field, checked_value = launch_fields.fields.check_edit(name, value, base_config)
        key = f"{field.section}.{field.name}"
        if key == "env.mixture":
            mixture.check_mixture(spec.profile, checked_value, self.schema_timeout_s)
        changed = spec.model_copy(update={"settings": {**spec.settings, key: checked_value}})
        for error in replace(launch_fields, spec=changed).find_validation_errors():
            if error["field"] == field.name:
                raise FieldValueError(
                    f"{launch_fields.environment.name} refuses it: {error['message']}"
                )
        return changed, field, checked_value

    # --- runs

    def resolve(self, spec: LaunchSpec) -> ResolvedLaunch:
        """Resolve a launch whose profile has what it needs here; nothing is started.

        Raises:
            LachesisError: The launch cannot start with these values.
        """
        return resolve_at_place(
            spec, self.store, self.schema_timeout_s, background_serve.read_key_names()
        )

    def check(self, spec: LaunchSpec) -> ResolvedLaunch:
        """Resolve a launch and check everything that a start needs, without making anything.

        Raises:
            LachesisError: What `start` would raise: a value, a model that cannot be had, a
                validation that is missing, or a Prefect server that is not known.
        """
        launch = check_launch(
            spec, self.store, self.tests, self.schema_timeout_s, background_serve.read_key_names()
        )
        PrefectApi()  # raises when no server is known, before anything is made
        return launch

    def preview(self, spec: LaunchSpec) -> LaunchPreview:
        """Return what a start would make of a launch; nothing is written."""
        return preview_launch(
            spec, self.store, self.tests, self.schema_timeout_s, background_serve.read_key_names()
        )

    def start(self, launch: LaunchSpec | ResolvedLaunch, run_id: str | None = None) -> RunRecord:
        """Create a run and submit it; no run is left behind when this raises.

        Args:
            launch: A spec, or what `check` has returned for it, which is not checked again.
            run_id: The id of the run; a new one by default. A run of this id that exists already,
                because an earlier start was killed, is submitted.
        """
        run_id = run_id or self.store.new_id()
        if self.store.dir(run_id).record.is_file():
            record = self.store.load(run_id)
            if record.flow_run_id:
                return record
            return submit.submit_run(self.store, record)
        resolved = self.check(launch) if isinstance(launch, LaunchSpec) else launch
        record = create_run(self.store, self.tests, resolved, run_id)
        try:
            return submit.submit_run(self.store, record)
        except BaseException:
            self.store.discard(record.run_id)
            raise

    def build_tiny_model(self, config: RunConfig, progress: build.ProgressCallback) -> None:
        """Build the tiny model, if this configuration needs it, with progress; otherwise the run
        builds it.
        """
        if Path(config.openai.model_name) == choose_model.get_default_tiny_model_path(
            self.store.home
        ):
            build.ensure_tiny_model(build.TinyModelRecipe(), self.store.home, progress)

    # --- inference tests

    def check_test(self, spec: TestSpec) -> ResolvedTest:
        """Check everything that an inference test needs to start, without making anything.

        Raises:
            LachesisError: What `start_test` would raise.
        """
        resolved = resolve_test(
            spec, self.store.home, self.schema_timeout_s, background_serve.read_key_names()
        )
        PrefectApi()  # raises when no server is known, before anything is made
        return resolved

    def start_test(self, test: TestSpec | ResolvedTest) -> InferenceTest:
        """Submit an inference test of an environment.

        Args:
            test: A spec, or what `check_test` has returned for it.
        """
        resolved = self.check_test(test) if isinstance(test, TestSpec) else test
        inference_test = create_test(self.tests, resolved)
        try:
            submit.submit_test(self.tests, inference_test)
        except BaseException:
            self.tests.discard(inference_test.test_id)
            raise
        return inference_test

    def get_test(self, test_id: str) -> InferenceTest:
        """Return the current state of the test."""
        return refresh.refresh_test(self.tests, self.tests.load_and_fail_if_dead(test_id))

    # --- runs again

    def resume(
        self, run_id: str, limits: Json | None = None, *, by_owner: bool = False
    ) -> RunRecord:
        """Resume an ended run from its newest complete checkpoint; a run that has not ended is
        returned.

        Args:
            run_id: The run.
            limits: New values of its budgets. Without them, a budget that is used up would end the
                run again at once, so such a run is refused.
            by_owner: Whether the owner of this installation resumes it, and no agent.
        """
        record = self.get_run(run_id)
        if not record.has_ended:
            return record
        changes, config = prepare_resume(
            self.store, record, limits, background_serve.read_key_names(), by_owner=by_owner
        )
        PrefectApi()  # raises when no server is known, before anything is changed
        return submit.resubmit_run(self.store, record, config, auto_resumes=0, **changes)

    def read_editable_values(self, record: RunRecord) -> Json:
        """Return the values of the run's editable fields."""
        config = read_effective_config(self.store.dir(record.run_id))
        return get_editable_values(config)

    def get_run(self, run_id: str) -> RunRecord:
        """Return the record of a run with the status that the server reports."""
        return refresh.refresh_run(self.store, self.store.load(run_id))

    def list_runs(self) -> list[RunRecord]:
        """Return all runs, the newest first."""
        return self.list_runs_with_warning()[0]

    def list_runs_with_warning(self) -> tuple[list[RunRecord], str | None]:
        """Return all runs, newest first, and what prevents their statuses from being up to date, or
        None.
        """
        records, unreadable = self.store.scan()
        observed_records, warning = refresh.refresh_runs(self.store, records)
        damage_warning = (
            unreadable
            and f"the records of these runs cannot be read: {', '.join(unreadable[:10])}; see "
            f"{self.store.root}"
        )
        return refresh_newest_health(self.store, observed_records), "; ".join(
            text for text in (warning, damage_warning) if text
        ) or None

    def get_status(
        self, run_id: str, next_step_templates: Mapping[str, str] = NEXT_STEP_COMMANDS
    ) -> RunStatus:
        """Return the status of the run. `next_step_templates` are the next steps of the user
        interface.
        """
        observed_records, warning = refresh.refresh_runs(self.store, [self.store.load(run_id)])
        record = refresh_health(self.store, observed_records[0])
        return build_run_status(
            record,
            self.store.dir(run_id),
            self.read_metrics(run_id),
            ui_url=submit.get_run_url(record),
            queue=submit.find_queue_position(self.store, run_id)
            if record.status == "pending"
            else None,
            warning=warning,
            next_step_templates=next_step_templates,
        )

    def read_metrics(self, run_id: str) -> list[Json]:
        """Return the metrics of every step of the run."""
        self.store.load(run_id)
        return MetricsFile(self.store.dir(run_id).metrics).read()

    def stop(self, run_id: str, *, now: bool = False) -> Json:
        """Ask the run to save a checkpoint and end, and return at once.

        With `now`, its processes are ended without a checkpoint, which also ends a stop that takes
        too long.
        """
        record = self.get_run(run_id)
        # otherwise the monitor would resume it
        if record.resume_requested or (record.status == "failed" and not record.stop_reason):
            self.store.update(
                run_id,
                resume_requested=False,
                stop_reason=record.stop_reason or submit.STOPPED_BY_USER,
            )
        if record.has_ended:
            return {
                "message": f"run {run_id} is not running and will not be resumed",
                "run_id": run_id,
                "status": record.status,
            }
        if now:
            write_private(self.store.dir(run_id).stop_now_file, "")
        submit.cancel_run(self.store, record)
        record = self.get_run(run_id)
        if record.has_ended:  # A short run may end meanwhile, and by itself.
            message = f"run {run_id} is {record.status}"
        else:
            message = f"run {run_id} is being stopped"
        return {"message": message, "run_id": run_id, "status": record.status}

    def get_results(
        self, run_id: str, next_step_templates: Mapping[str, str] = NEXT_STEP_COMMANDS
    ) -> RunResults:
        """Return the results of the run. `next_step_templates` are the next steps of the user
        interface.
        """
        record = refresh_health(self.store, self.get_run(run_id))
        return build_run_results(
            record,
            self.store.dir(run_id),
            self.read_metrics(run_id),
            next_step_templates=next_step_templates,
        )

    def write_report(self, run_id: str, target: Path | None = None) -> list[Path]:
        """Write the run's report, and return the HTML file and then its charts.

        Raises:
            StorageError: A file cannot be written.
        """
        from lachesis.web.report_file import write_charts, write_page

        run_dir, record = self.store.dir(run_id), refresh_health(self.store, self.get_run(run_id))
        folder = target or run_dir.path / "report"
        results, page = self.get_results(run_id), folder / "report.html"
        write_page(record, run_dir, results, page)
        return [page, *write_charts(run_dir, results, folder)]

    def read_log(self, run_id: str, service: str, lines: int = 50) -> tuple[Path, str, int]:
        """Return a log file of the run, its last lines, and the position at which to continue
        reading.

        Raises:
            ConfigError: The run has no such process.
        """
        log_files = find_log_files(self.store.load(run_id), self.store.dir(run_id))
        if service not in log_files:
            raise ConfigError(
                f"run {run_id} has no process {shorten(repr(service), 60)}; allowed: "
                f"{', '.join(log_files)}"
            )
        path = Path(log_files[service])
        position = path.stat().st_size if path.exists() else 0
        return path, read_last_lines(path, lines), position
