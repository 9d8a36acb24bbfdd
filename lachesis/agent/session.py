"""What one agent does: it selects an environment, edits a draft, starts it, and looks at its runs. Kept per session."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from pydantic import ValidationError

from lachesis import __version__
from lachesis.agent import schemas, views
from lachesis.agent.session_store import AskedTest, Check, Draft, Session, SessionState, Start
from lachesis.base import paths
from lachesis.base.errors import ConfigError, LachesisError, RunStateError, StorageError, UnknownTestError
from lachesis.config.edits import get_editable_values
from lachesis.config.profiles import list_missing_keys
from lachesis.config.run_config import PROFILES, load_profile_values, read_env_number
from lachesis.orchestration import launcher
from lachesis.orchestration.launch_inputs import describe_default_model, find_model_problem
from lachesis.orchestration.prefect_api import find_api_url
from lachesis.reporting.status import Json, QueuePlace, RunResults, RunStatus, find_log_files
from lachesis.runs.checkpoints import Checkpoints
from lachesis.runs.store import RunRecord
from lachesis.service import LaunchRequest, Service
from lachesis.validation.tests import InferenceTest, TestOptions

DUPLICATE_S = 60.0
"""The same draft started again in this time is taken for a repeated call."""
TEST_WAIT_S = 25.0
SCHEMA_TIMEOUT_S = 25.0
"""Clients give up on a call after 30 to 60 seconds."""
Tell = Callable[[float, float, str], None]
"""Seconds waited, most seconds, and in words what is known. The first grows with each call, as MCP asks of progress."""
TELL_S = 2.0


def status_interval_s() -> float:
    """Seconds between two live looks at the same run, from $LACHESIS_STATUS_INTERVAL_S. Raises ConfigError."""
    return read_env_number("LACHESIS_STATUS_INTERVAL_S", 1800, min_value=0)


def default_profile() -> str:
    return os.environ.get("LACHESIS_PROFILE", "embedded")


class Desk:
    """The use cases of one session. Every method raises LachesisError and nothing else that an agent could cause."""

    def __init__(self, session: str, service: Service | None = None) -> None:
        self.service = service or Service(schema_timeout_s=SCHEMA_TIMEOUT_S)
        self.session = Session(session, self.service.store.home)

    # --- the draft --------------------------------------------------------------------------------------------------

    def select(self, name: str, profile: str | None = None, model: str | None = None) -> schemas.Selected:
        draft = Draft(environment=name, profile=profile or default_profile(), model=model)
        found = self.service.describe(_launch(draft))
        missing = list_missing_keys(draft.profile, launcher.read_key_names())
        lacking = f"a start on profile {draft.profile} needs {', '.join(missing)} in the environment of `lachesis serve`"
        with self.session.change() as state:
            state.draft = draft
        return schemas.Selected(
            message=f"{name} is selected; edit it with rl_edit_config, try it with rl_test_inference, start it with "
            "rl_start_training",
            environment=name,
            file_path=found["file_path"],
            profile=draft.profile,
            config=views.values(found),
            session=self.session.name,
            **views.known(warning="; ".join(one for one in (found["warning"], missing and lacking, found["problem"]) if one)),
        )

    def current_config(self) -> schemas.CurrentConfig:
        draft = self._draft(self.session.read())
        found = self.service.describe(_launch(draft))
        free = [field for field in found["fields"] if not field["locked"]]
        locked = [field for field in found["fields"] if field["locked"]]
        return schemas.CurrentConfig(
            environment=draft.environment,
            profile=draft.profile,
            model=found["model"],
            configurable_fields=[views.field(one) for one in free],
            locked_fields=[views.locked_field(one) for one in locked],
            tip="rl_edit_config(field, value) changes a configurable field; locked ones belong to the profile and its operator",
            **views.known(problem=found["problem"], warning=found["warning"]),
        )

    def edit(self, field: str, value: Any) -> schemas.Edited:
        with self.session.change() as state:
            draft = self._draft(state)
            launch, edited, checked = self.service.edit(_launch(draft), field, value)
            state.draft = draft.model_copy(update={"edits": dict(launch.edits)})
        found = self.service.describe(launch)
        return schemas.Edited(
            message=f"{edited.section}.{edited.name} is now {checked!r}",
            field=edited.name,
            value=checked,
            config=views.values(found),
            **views.known(problem=found["problem"]),
        )

    def _draft(self, state: SessionState) -> Draft:
        if state.draft is None:
            raise RunStateError(
                f"no environment is selected in session {self.session.name}: call rl_select_environment(name) first; "
                "rl_list_environments() shows the names"
            )
        return state.draft

    # --- runs -------------------------------------------------------------------------------------------------------

    def start(
        self,
        *,
        key: str | None = None,
        allow_duplicate: bool = False,
        require_validation: bool = False,
        start_from: str | None = None,
    ) -> schemas.Started:
        """Start the draft. The same draft within a minute, or the same key, gives the run that there is.

        What is about to be started is written first: an agent that is killed meanwhile and calls again gets that run."""
        with self.session.change() as state:
            draft = self._draft(state).model_copy(update={"start_from": start_from})
            start = _earlier(state, draft, key, allow_duplicate=allow_duplicate)
            again = start is not None
            if start is None:
                start = Start(run_id=self.service.store.new_id(), draft=draft, at=time.time(), key=key)
                state.starts.append(start)
                self.session.write(state)
            try:
                wanted = replace(_launch(draft), require_validation=require_validation)
                record = self.service.start(wanted, start.run_id)
            except LachesisError:
                if not again:
                    state.starts.remove(start)
                    self.session.write(state)
                raise
        if not again:
            return self._started(record, model=describe_default_model(_launch(draft), record.base_model))
        return self._started(
            self.service.get(record.run_id), "was started by an equal call; allow_duplicate=true starts another one"
        )

    def resume(self, run_id: str, limits: Json | None = None) -> schemas.Started:
        """Continue an ended run, with new limits where they are given; one that lives is returned as it is."""
        alive = not self.service.get(run_id).has_ended
        record = self.service.resume(run_id, limits)
        self._look_anew(run_id)
        return self._started(record, "lives, so there is nothing to resume" if alive else "")

    def _look_anew(self, run_id: str) -> None:
        """The next report is live: the last one is about another time of the run."""
        with self.session.change() as state:
            state.checks.pop(run_id, None)

    def _started(self, record: RunRecord, instead: str = "", model: str | None = None) -> schemas.Started:
        """The answer to a start; `instead` tells why nothing was started, `model` which one was chosen by default."""
        run, call = record.run_id, views.CALLS["status"].format(run=record.run_id)
        folder = self.service.store.dir(run)
        queue = launcher.find_queue_position(self.service.store, run) if record.status == "pending" else None
        what = f"waits at place {queue['place']} of this host's queue" if queue else "is starting"
        if instead:
            what = f"({record.status}) {instead}"
        return schemas.Started(
            message="; ".join(filter(None, (f"run {run} {what}", model, f"{call} tells how it does"))),
            run_id=run,
            status="starting" if record.status == "pending" else record.status,
            environment=record.environment,
            config=self.service.editable_values(record),
            wandb_project=record.wandb_project,
            wandb_run_name=record.wandb_run_name,
            config_path=str(folder.config),
            logs=find_log_files(record, folder),
            ui_url=launcher.get_run_url(record),
            profile=record.profile,
            next_steps=[f"{call} in some minutes; it goes on by itself"],
            **views.known(queue=QueuePlace(**queue) if queue else None, duplicate=bool(instead)),
        )

    def preview(self, start_from: str | None = None) -> schemas.Started:
        """What a start would do now. Nothing is written or submitted."""
        draft = self._draft(self.session.read()).model_copy(update={"start_from": start_from})
        launch = _launch(draft)
        config, plan = self.service.preview(launch)
        missing = list_missing_keys(draft.profile, launcher.read_key_names())
        lacking = missing and f"{', '.join(missing)} is not in the environment of `lachesis serve`"
        problem = lacking or find_model_problem(launch, config, self.service.store.home)
        return schemas.Started(
            message="nothing was started; this is what rl_start_training() would start",
            environment=draft.environment,
            config=get_editable_values(config),
            wandb_project=config.tinker.wandb_project,
            profile=draft.profile,
            dry_run=True,
            config_yaml=plan.config.to_yaml(),
            services=views.services(plan),
            base_model=config.openai.model_name,
            next_steps=["rl_start_training()"],
            **views.known(problem=problem and f"it cannot start: {problem}"),
        )

    def preview_resume(self, run_id: str) -> schemas.Started:
        """What continuing the run would mean. Nothing is changed."""
        record = self.service.get(run_id)
        newest = Checkpoints(self.service.store.dir(run_id).checkpoints).find_newest()
        where = f"go on from its checkpoint of step {newest.step}" if newest else "begin again, as it has no checkpoint,"
        return schemas.Started(
            message=f"nothing was started; run {run_id} ({record.status}) would {where} on profile {record.profile}",
            run_id=run_id,
            status=record.status,
            environment=record.environment,
            config=self.service.editable_values(record),
            wandb_project=record.wandb_project,
            profile=record.profile,
            dry_run=True,
            next_steps=[views.CALLS["resume"].format(run=run_id)],
        )

    def status(self, run_id: str) -> schemas.CheckedStatus:
        """A live report, at most one per run in `status_interval_s` while nothing but numbers changes; a run that has ended is
        always reported."""
        report = self.live_status(run_id)  # an unknown id is told before the limit is touched
        if report.status in ("completed", "failed", "stopped"):
            return schemas.CheckedStatus(**report.to_payload())
        with self.session.change() as state:
            last = state.checks.get(run_id)
            left = 0.0 if last is None else last.at + status_interval_s() - time.time()
            if last is not None and left > 0 and _news(report) == _news(last.report):
                with contextlib.suppress(ValidationError):  # a report of another version
                    return views.limited(last, left)
            state.checks[run_id] = Check(at=time.time(), report=report.to_payload())
        return schemas.CheckedStatus(**report.to_payload())

    def live_status(self, run_id: str) -> RunStatus:
        """As `status`, without its limit."""
        return self.service.status(run_id, views.CALLS)

    def stop(self, run_id: str) -> schemas.Stopped:
        stopped = self.service.stop(run_id)
        self._look_anew(run_id)
        return schemas.Stopped(**stopped)

    def results(self, run_id: str) -> RunResults:
        return self.service.results(run_id, views.CALLS)

    def runs(self, limit: int | None = None) -> schemas.RunList:
        records, warning = self.service.look_at_runs()
        shown = set(schemas.RunEntry.model_fields)
        entries = [
            schemas.RunEntry(**record.model_dump(include=shown), learning=record.learning, evidence=record.evidence)
            for record in records[:limit]
        ]
        return schemas.RunList(runs=entries, count=len(records), **views.known(warning=warning))

    # --- inference tests --------------------------------------------------------------------------------------------

    def test(self, wanted: TestOptions, tell: Tell, wait_s: float = TEST_WAIT_S) -> schemas.TestReport:
        """Test the draft's environment; takes at most about `wait_s` seconds. The same call again goes on waiting."""
        until = time.monotonic() + wait_s
        with self.session.change() as state:
            draft = self._draft(state)
            asked = {**draft.model_dump(mode="json"), **wanted.model_dump(mode="json")}
            if state.test is None or state.test.asked != asked or self._is_over(state.test.test_id):
                state.test = AskedTest(asked=asked, test_id=self.service.start_test(_launch(draft), wanted).test_id)
            test_id = state.test.test_id
        return self.test_again(test_id, tell, until)

    def _is_over(self, test_id: str) -> bool:
        try:
            return self.service.test(test_id).has_ended
        except UnknownTestError:
            return True

    def test_again(self, test_id: str, tell: Tell, until: float | None = None) -> schemas.TestReport:
        """The result of a test, waited for until that time of the monotonic clock, by default as long as a call may take."""
        started, told = time.monotonic(), 0.0
        until = until or started + TEST_WAIT_S
        self.service.test(test_id)  # one that is dead is told at once
        while not (test := self.service.tests.load_and_fail_if_dead(test_id)).has_ended and (now := time.monotonic()) < until:
            if now - started - told > TELL_S:
                told, (done, total) = now - started, self._groups(test)
                tell(round(told, 1), round(until - started, 1), f"{test.status}: {done} of {total} groups")
            time.sleep(0.25)
        return self._test_report(self.service.test(test_id))

    def _groups(self, test: InferenceTest) -> tuple[int, int]:
        return self.service.tests.count_finished_groups(test), test.request.num_steps * len(test.request.models)

    def _test_report(self, test: InferenceTest) -> schemas.TestReport:
        try:
            return self._told_test(test)
        except (ValidationError, AttributeError, TypeError, KeyError) as error:
            file = self.service.tests.dir(test.test_id) / "test.json"
            raise StorageError(f"{file} is damaged ({type(error).__name__}); test again") from error

    def _told_test(self, test: InferenceTest) -> schemas.TestReport:
        done, total = self._groups(test)
        again = f'rl_test_inference(test_id="{test.test_id}")'
        message = None if test.has_ended else f"the test goes on; {again} waits for it and gives its result"
        named = {"environment": test.request.environment, "environment_file": test.request.environment_file}
        return schemas.TestReport(
            test_id=test.test_id,
            status=test.status,
            groups_done=done,
            groups_total=total,
            stages=test.stages,
            next_steps=views.after_test(test) if test.has_ended else [again],
            **{**(test.result or {}), **named},
            **views.known(message=message, error=test.error),
        )

    # --- the rest ---------------------------------------------------------------------------------------------------

    def environments(self) -> schemas.EnvironmentList:
        scan = self.service.environments()
        return schemas.EnvironmentList(
            environments=[
                schemas.EnvironmentEntry(**{key: value for key, value in asdict(one).items() if key != "config_class"})
                for one in scan.environments
            ],
            count=len(scan.environments),
            tips=[
                "rl_select_environment(name) chooses one; its answer has the fields and their values",
                "rl_test_inference() tries it before anything is trained",
                "rl_check_environment(name, new=true) begins one of your own and checks it; files of yours are found in "
                f"{' and '.join(map(str, paths.environment_dirs()))} (more: LACHESIS_ENVIRONMENTS)",
            ],
            **views.known(problems=scan.problems, clashes=scan.clashes),
        )

    def health(self) -> schemas.Health:
        """Whether the parts that a run needs are there. Never raises for a part that is missing."""
        found = launcher.find_server_problem(self.service.store.home)
        problems = [found] if found else []
        state = SessionState()
        try:
            state = self.session.read()
        except LachesisError as error:
            problems.append(str(error))
        profile = state.draft.profile if state.draft else default_profile()
        missing: list[str] = []
        try:
            load_profile_values(profile)
            missing = list_missing_keys(profile, launcher.read_key_names())
        except ConfigError as error:
            problems.append(str(error))
        scan = self.service.environments()
        problems += [f"{file} does not parse: {reason}" for file, reason in scan.problems.items()]
        problems += [f"profile {profile} needs {key} in the environment of `lachesis serve`" for key in missing]
        return schemas.Health(
            status="degraded" if problems else "ok",
            version=__version__,
            problems=problems,
            prefect_url=find_api_url(),
            profile=profile,
            missing_keys=missing,
            environments_discovered=len(scan.environments),
            current_environment=state.draft.environment if state.draft else None,
            active_runs=[record.run_id for record in self.service.store.all() if not record.has_ended],
            max_runs=launcher.get_max_runs(),
            session=self.session.name,
            home=str(paths.home()),
        )

    def is_paid(self, run_id: str | None = None) -> bool:
        """Whether the draft, or that run, trains where somebody may be billed."""
        profile = self.service.store.load(run_id).profile if run_id else self._draft(self.session.read()).profile
        return PROFILES[profile].is_paid if profile in PROFILES else True


def _news(report: RunStatus | Json) -> tuple[Any, ...]:
    """What is told at once when it changes: the status, what the run is doing, and when its end can be foreseen."""
    plain = report.to_payload() if isinstance(report, RunStatus) else report
    return plain.get("status"), plain.get("phase"), (plain.get("progress") or {}).get("eta_seconds") is None


def _launch(draft: Draft) -> LaunchRequest:
    return LaunchRequest(draft.environment, draft.profile, tuple(draft.edits.items()), draft.model, start_from=draft.start_from)


def _earlier(state: SessionState, draft: Draft, key: str | None, *, allow_duplicate: bool) -> Start | None:
    """The start that this one repeats. Raises ConfigError when the key stands for another draft."""
    for start in reversed(state.starts):
        if key is not None and start.key == key:
            if start.draft != draft:
                raise ConfigError(
                    f"idempotency_key {key!r} belongs to run {start.run_id}, which has another configuration; use a new key"
                )
            return start
        if key is None and not allow_duplicate and start.draft == draft and time.time() - start.at < DUPLICATE_S:
            return start
    return None
