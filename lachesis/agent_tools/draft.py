"""Implement what one agent does in its session: select an environment, edit the draft, start it,
and look at its runs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from pydantic import ValidationError

from lachesis.agent_tools import schemas, views
from lachesis.agent_tools.session import LastReport, SessionFile, SessionState, StartedRun
from lachesis.base import paths
from lachesis.base.api_keys import describe_places
from lachesis.base.errors import ConfigError, LachesisError, RunStateError
from lachesis.base.json_text import Json
from lachesis.config.backends import BACKEND_FIELDS
from lachesis.config.installation_settings import get_default_profile
from lachesis.config.launch_spec import LaunchSpec, read_spec
from lachesis.config.value_parsing import read_env_number
from lachesis.operations.environments import scan_environments
from lachesis.operations.launches import (
    describe_default_model,
    describe_launch,
    edit_launch,
    find_missing_keys,
    start_run,
)
from lachesis.operations.run_lists import list_runs_with_warning
from lachesis.operations.runs import (
    find_queue_position,
    get_results,
    get_run,
    get_run_url,
    get_status,
    read_editable_values,
    resume_run,
    stop_run,
)
from lachesis.reporting.run_schemas import QueuePlace, RunResults, RunStatus
from lachesis.reporting.run_view import find_log_files
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore

MAX_TEST_WAIT_S = 25.0
# Seconds to wait for an environment's schema; clients give up on a call after 30 to 60 seconds.
SCHEMA_TIMEOUT_S = 25.0
# Receives the seconds waited, the maximum wait in seconds, and a text. The first number grows with
# each call, as MCP requires.
ReportProgress = Callable[[float, float, str], None]
PROGRESS_INTERVAL_S = 2.0


def get_status_interval_s() -> float:
    """Return the minimum seconds between two live reports about the same run.

    Raises:
        ConfigError: $LACHESIS_STATUS_INTERVAL_S is not a valid number.
    """
    return read_env_number("LACHESIS_STATUS_INTERVAL_S", 1800, min_value=0)


class AgentSession:
    """The operations of one session. Its methods raise only LachesisError for errors that an agent
    can cause.
    """

    def __init__(self, session_name: str, store: RunStore | None = None) -> None:
        self.store = store or RunStore()
        self.session_file = SessionFile(session_name, self.store.home)

    # --- the draft

    def select(
        self, name: str, profile: str | None = None, model: str | None = None
    ) -> schemas.SelectAnswer:
        """Select an environment: replace the draft by a new one with default values."""
        values = {"environment": name, "profile": profile or get_default_profile(), "model": model}
        draft = read_spec(LaunchSpec, {**values, "by_agent": True})
        launch_description = describe_launch(self.store, draft, schema_timeout_s=SCHEMA_TIMEOUT_S)
        missing = find_missing_keys(draft.profile)
        warnings = [launch_description["warning"], launch_description["problem"]]
        if missing:
            warnings.append(
                f"a start on profile {draft.profile} needs {', '.join(missing)} in the environment "
                f"of `lachesis serve`, in {describe_places()}"
            )
        with self.session_file.change() as state:
            state.draft = draft
        return schemas.SelectAnswer(
            message=f"{name} is selected; edit it with rl_edit_config, test it with "
            "rl_test_inference, start it with rl_start_training",
            environment=name,
            file_path=launch_description["file_path"],
            profile=draft.profile,
            config=views.select_editable_values(launch_description),
            session=self.session_file.name,
            **views.drop_empty(warning="; ".join(filter(None, warnings))),
        )

    def get_current_config(self) -> schemas.CurrentConfig:
        """Return the fields of the draft with their values, those that can be edited and those that
        are locked.
        """
        draft = self.require_draft(self.session_file.read())
        launch_description = describe_launch(self.store, draft, schema_timeout_s=SCHEMA_TIMEOUT_S)
        # Fields of another profile would only have to be read.
        others = () if draft.profile == "custom" else BACKEND_FIELDS
        fields = [field for field in launch_description["fields"] if field["name"] not in others]
        editable_fields = [field for field in fields if not field["locked"]]
        locked_fields = [field for field in fields if field["locked"]]
        return schemas.CurrentConfig(
            environment=draft.environment,
            profile=draft.profile,
            model=launch_description["model"],
            configurable_fields=[views.build_field_view(field) for field in editable_fields],
            locked_fields=[views.build_locked_field_view(field) for field in locked_fields],
            tip="rl_edit_config(field, value) changes a configurable field; locked ones belong to "
            "the profile and its operator",
            **views.drop_empty(
                problem=launch_description["problem"], warning=launch_description["warning"]
            ),
        )

    def edit(self, field: str, value: object) -> schemas.EditAnswer:
        """Change one field of the draft."""
        with self.session_file.change() as state:
            draft, edited_field, checked_value = edit_launch(
                self.store, self.require_draft(state), field, value
            )
            state.draft = draft
        launch_description = describe_launch(self.store, draft, schema_timeout_s=SCHEMA_TIMEOUT_S)
        return schemas.EditAnswer(
            message=f"{edited_field.section}.{edited_field.name} is now {checked_value!r}",
            field=edited_field.name,
            value=checked_value,
            config=views.select_editable_values(launch_description),
            **views.drop_empty(problem=launch_description["problem"]),
        )

    def require_draft(self, state: SessionState) -> LaunchSpec:
        """Return the draft, or raise ConfigError if no environment is selected."""
        if state.draft is None:
            raise RunStateError(
                f"no environment is selected in session {self.session_file.name}: call "
                f"rl_select_environment(name) first; "
                "rl_list_environments() shows the names"
            )
        return state.draft

    # --- runs

    def start(
        self,
        *,
        key: str | None = None,
        require_validation: bool = False,
        from_checkpoint: str | None = None,
        confirmed: bool = False,
    ) -> schemas.StartAnswer:
        """Start the draft. The same key returns the existing run.

        The intended start is written to disk first, so that an agent that is killed meanwhile and
        calls again gets the same run.
        """
        with self.session_file.change() as state:
            draft = self.require_draft(state).model_copy(
                update={
                    "from_checkpoint": from_checkpoint,
                    "require_validation": require_validation,
                }
            )
            start = _find_earlier_start(state, draft, key)
            is_repeated = start is not None
            if start is None:
                start = StartedRun(
                    run_id=self.store.new_id(), draft=draft, started_at=time.time(), key=key
                )
                state.starts.append(start)
                self.session_file.write(state)
            try:
                spec = draft.model_copy(update={"confirmed": confirmed})
                record = start_run(
                    self.store, spec, start.run_id, schema_timeout_s=SCHEMA_TIMEOUT_S
                )
            except LachesisError:
                if not is_repeated:
                    state.starts.remove(start)
                    self.session_file.write(state)
                raise
        if not is_repeated:
            return self._build_start_answer(
                record,
                model_note=describe_default_model(draft, record.base_model),
            )
        return self._build_start_answer(
            get_run(self.store, record.run_id),
            "was started by the same call earlier; another idempotency_key starts another one",
        )

    def resume(self, run_id: str, limits: Json | None = None) -> schemas.StartAnswer:
        """Resume an ended run, with new limits if given; a run that has not ended is returned
        unchanged.
        """
        is_alive = not get_run(self.store, run_id).has_ended
        record = resume_run(self.store, run_id, limits)
        self._forget_last_report(run_id)
        return self._build_start_answer(
            record, "has not ended, so there is nothing to resume" if is_alive else ""
        )

    def _forget_last_report(self, run_id: str) -> None:
        """Make the next report live, because the last one describes an earlier state of the run."""
        with self.session_file.change() as state:
            state.last_reports.pop(run_id, None)

    def _build_start_answer(
        self, record: RunRecord, not_started_reason: str = "", model_note: str | None = None
    ) -> schemas.StartAnswer:
        """Return the answer to a start.

        Args:
            record: The run.
            not_started_reason: Why nothing was started, if so.
            model_note: Which model was chosen by default, if so.
        """
        run_id = record.run_id
        run_dir = self.store.dir(run_id)
        queue = find_queue_position(record, self.store.home)
        if not_started_reason:
            state_text = f"({record.status}) {not_started_reason}"
        elif record.status == "pending" and record.flow_run_id is None:
            state_text = f"is {record.phase}"
        elif queue:
            state_text = f"is waiting at place {queue['place']} of this host's queue"
        else:
            state_text = "is starting"
        status_call = views.NEXT_STEP_CALLS["status"].format(run=run_id)
        parts = (f"run {run_id} {state_text}", model_note, f"{status_call} reports its status")
        return schemas.StartAnswer(
            message="; ".join(filter(None, parts)),
            run_id=run_id,
            status="starting" if record.status == "pending" else record.status,
            environment=record.environment,
            config=read_editable_values(self.store, record),
            wandb_project=record.wandb_project,
            wandb_run_name=record.wandb_run_name,
            config_path=str(run_dir.config),
            logs=find_log_files(record, run_dir),
            ui_url=get_run_url(record),
            profile=record.profile,
            next_steps=[f"{status_call} in some minutes; the run continues by itself"],
            **views.drop_empty(
                queue=QueuePlace(**queue) if queue else None, duplicate=bool(not_started_reason)
            ),
        )

    def get_status(self, run_id: str) -> schemas.RateLimitedStatus:
        """Return a live report, at most one per run and interval while only its numbers change.

        A run that has ended is always reported.
        """
        report = self.get_live_status(
            run_id
        )  # raises for an unknown id before the limit is applied
        if report.status in ("completed", "failed", "stopped"):
            return schemas.RateLimitedStatus(**report.to_payload())
        with self.session_file.change() as state:
            last_report = state.last_reports.get(run_id)
            if last_report is None:
                remaining_s = 0.0
            else:
                remaining_s = last_report.reported_at + get_status_interval_s() - time.time()
            if (
                last_report is not None
                and remaining_s > 0
                and _get_change_key(report) == _get_change_key(last_report.report)
            ):
                with contextlib.suppress(
                    ValidationError
                ):  # the report was written by another version
                    return views.build_rate_limited_status(last_report, remaining_s)
            state.last_reports[run_id] = LastReport(
                reported_at=time.time(), report=report.to_payload()
            )
        return schemas.RateLimitedStatus(**report.to_payload())

    def get_live_status(self, run_id: str) -> RunStatus:
        """Return a live report without that limit."""
        return get_status(self.store, run_id, views.NEXT_STEP_CALLS)

    def stop(self, run_id: str) -> schemas.StopAnswer:
        """Ask a run to save a checkpoint and end."""
        answer = stop_run(self.store, run_id, by_agent=True)
        self._forget_last_report(run_id)
        return schemas.StopAnswer(**answer)

    def get_results(self, run_id: str) -> RunResults:
        """Return the rewards, held-out results and weights of a run."""
        return get_results(self.store, run_id, views.NEXT_STEP_CALLS)

    def list_runs(self, limit: int | None = None) -> schemas.RunList:
        """Return all runs of this home, not only those of this session, the newest first."""
        records, warning = list_runs_with_warning(self.store)
        entry_fields = set(schemas.RunEntry.model_fields)
        entries = [
            schemas.RunEntry(
                **record.model_dump(include=entry_fields),
                learning=record.learning,
                evidence=record.evidence,
                stalled=record.stall_text,
            )
            for record in records[:limit]
        ]
        return schemas.RunList(
            runs=entries, count=len(records), **views.drop_empty(warning=warning)
        )

    # --- environments

    def list_environments(self) -> schemas.EnvironmentList:
        """Return the environments that are found now, with the next steps of an agent."""
        scan = scan_environments()
        return schemas.EnvironmentList(
            environments=[
                schemas.EnvironmentEntry(
                    **{
                        key: value
                        for key, value in asdict(environment).items()
                        if key != "config_class"
                    }
                )
                for environment in scan.environments
            ],
            count=len(scan.environments),
            tips=[
                "rl_select_environment(name) chooses one; its answer has the fields and their "
                "values",
                "rl_test_inference() tests it before anything is trained",
                "rl_check_environment(name, new=true) creates one of your own and checks it; your "
                "files are found in "
                f"{' and '.join(map(str, paths.environment_dirs()))} (more: LACHESIS_ENVIRONMENTS)",
            ],
            **views.drop_empty(problems=scan.problems, clashes=scan.clashes),
        )


def _get_change_key(report: RunStatus | Json) -> tuple[Any, ...]:
    """Return what is reported at once when it changes.

    It is the status, the phase, whether the end can be estimated, the word of the judgement, and
    the part that has stalled.
    """
    if isinstance(report, RunStatus):
        payload = report.to_payload()
    else:
        payload = report
    health = payload.get("health") or {}
    return (
        payload.get("status"),
        payload.get("phase"),
        (payload.get("progress") or {}).get("eta_seconds") is None,
        health.get("word"),
        (health.get("stalled") or {}).get("part"),
    )


def _find_earlier_start(
    state: SessionState, draft: LaunchSpec, key: str | None
) -> StartedRun | None:
    """Return the start with the same key, if there is one.

    Raises:
        ConfigError: The key belongs to a different draft.
    """
    start = next((start for start in state.starts if key is not None and start.key == key), None)
    if start is not None and start.draft != draft:
        raise ConfigError(
            f"idempotency_key {key!r} belongs to run {start.run_id}, which has another "
            f"configuration; use a new key"
        )
    return start
