"""The use cases behind the command line and every other surface. Everything that lasts is on disk
or in Prefect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lachesis.base.errors import ConfigError, FieldValueError, RunStateError, shorten
from lachesis.base.files import read_last_lines, write_private
from lachesis.catalog import describe as discovery
from lachesis.catalog.describe import EnvironmentSchema
from lachesis.catalog.fingerprint import compute_fingerprint
from lachesis.catalog.scan import Environment, ScanResult, scan_environments
from lachesis.config import mixture
from lachesis.config import run_config as run_config
from lachesis.config.edits import (
    TOP_SECTION,
    ConfigField,
    ConfigFields,
    describe_allowed,
    get_editable_values,
    replace_limits,
)
from lachesis.config.profiles import check_embedded, check_endpoint, check_profile
from lachesis.config.run_config import RunConfig
from lachesis.monitor.judgement import refresh_health, refresh_newest_health
from lachesis.orchestration import launch_inputs, launcher
from lachesis.orchestration.launch_inputs import LaunchRequest as LaunchRequest
from lachesis.orchestration.prefect_api import PrefectApi
from lachesis.orchestration.resuming import resubmit_run
from lachesis.reporting.status import (
    NEXT_STEP_COMMANDS,
    RunResults,
    RunStatus,
    build_run_results,
    build_run_status,
    find_log_files,
)
from lachesis.runs import fork
from lachesis.runs.budgets import compute_budget_usage, find_exceeded_budget, read_spent_file
from lachesis.runs.checkpoints import Checkpoints
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.store import AdditionalEnvironment, RunRecord, RunStore
from lachesis.supervision.plan import ServicePlan, make_training_plan
from lachesis.tiny_model import build
from lachesis.validation import gate
from lachesis.validation.tests import (
    DEFAULT_MODELS,
    EMBEDDED,
    InferenceRequest,
    InferenceTest,
    InferenceTestStore,
    TestOptions,
)

Json = dict[str, Any]


@dataclass(frozen=True)
class CheckedLaunch:
    """A launch that can start here: its environment, its configuration, and the checkpoint it
    begins from.
    """

    environment: Environment
    config: RunConfig
    fork_source: fork.ForkSource | None


class LachesisService:
    """One home folder. Every method raises LachesisError and nothing else that a user could cause."""

    def __init__(
        self, home: Path | None = None, *, schema_timeout_s: float = discovery.SCHEMA_TIMEOUT_S
    ) -> None:
        self.schema_timeout_s = schema_timeout_s
        self.store = RunStore(home)
        self.tests = InferenceTestStore(self.store.home)

    # --- environments
    # -----------------------------------------------------------------------------------------------

    def list_environments(self) -> ScanResult:
        return scan_environments()

    def describe(self, launch: LaunchRequest) -> Json:
        """One environment and its fields, with the value that this launch would have, and why it
        could not start so.
        """
        run_config.load_profile_values(launch.profile)
        environment = discovery.find_environment(launch.environment)
        schema = discovery.load_schema(environment, self.schema_timeout_s)
        fields = launch.fields(schema)
        problem = None
        try:
            config = self._build_config(launch, schema, fields)
            validation_errors = self._find_validation_errors(environment, schema, launch, fields)
            problem = (
                "; ".join(validation_error["message"] for validation_error in validation_errors)
                or None
            )
            problem = problem or launch_inputs.find_model_problem(launch, config, self.store.home)
        except ConfigError as error:
            problem = str(error)
            config = self._build_config(replace(launch, edits=()), schema, fields)
        values = config.model_dump()
        values[TOP_SECTION] = values
        for name, value in launch.edits:
            field = fields.find(name)
            values[field.section][field.name] = fields.parse_value(field, value)
        field_descriptions = [
            {
                "name": field.name,
                "section": field.section,
                "type": field.type,
                "default": field.default,
                "allowed": describe_allowed(field.schema),
                "description": field.description,
                "current_value": values[field.section].get(field.name),
                "locked": field.lock_reason,
            }
            for field in fields.by_name.values()
        ]
        return {
            **asdict(environment),
            "profile": launch.profile,
            "model": config.openai.model_name,
            "fields": field_descriptions,
            "problem": problem,
            "warning": schema.warning,
        }

    def edit(
        self, launch: LaunchRequest, name: str, value: Any
    ) -> tuple[LaunchRequest, ConfigField, Any]:
        """The launch with one field changed, that field, and its checked value. Raises
        UnknownFieldError, LockedFieldError or FieldValueError; a combination that cannot work is
        told by `describe` and refused by `resolve`.
        """
        run_config.load_profile_values(launch.profile)
        environment = discovery.find_environment(launch.environment)
        schema = discovery.load_schema(environment, self.schema_timeout_s)
        fields = launch.fields(schema)
        field, checked_value = fields.check_edit(
            name, value, self._build_config(replace(launch, edits=()), schema, fields)
        )
        key = f"{field.section}.{field.name}"
        if key == "env.mixture":
            mixture.check_mixture(launch.profile, checked_value, self.schema_timeout_s)
        changed = replace(
            launch,
            edits=(
                *(
                    (edited_key, old_value)
                    for edited_key, old_value in launch.edits
                    if edited_key != key
                ),
                (key, checked_value),
            ),
        )
        for validation_error in self._find_validation_errors(environment, schema, changed, fields):
            if validation_error["field"] == field.name:
                raise FieldValueError(
                    f"{environment.name} refuses it: {validation_error['message']}"
                )
        return changed, field, checked_value

    def _find_validation_errors(
        self,
        environment: Environment,
        schema: EnvironmentSchema,
        launch: LaunchRequest,
        fields: ConfigFields,
    ) -> list[dict[str, str]]:
        """What validators of the environment's own class say to the edits; they run in its own
        process only.
        """
        edited_fields = [(fields.find(name), value) for name, value in launch.edits]
        environment_values = {
            field.name: fields.parse_value(field, value)
            for field, value in edited_fields
            if field.section == "env"
        }
        return discovery.check_values(
            environment, schema, environment_values, self.schema_timeout_s
        )

    # --- runs
    # -------------------------------------------------------------------------------------------------------

    def resolve(self, launch: LaunchRequest) -> tuple[Environment, RunConfig]:
        """The checked configuration of a launch that can start here, before anything is started."""
        check_profile(launch.profile, launcher.read_key_names())
        return self._resolve_with_fork(launch)[:2]

    def check(self, launch: LaunchRequest) -> CheckedLaunch:
        """Check a launch without making anything.

        Raises what `start` would raise for these values, for a model that cannot be had, for a
        validation that is missing and when no server is known.
        """
        check_profile(launch.profile, launcher.read_key_names())
        environment, config, fork_source = self._resolve_with_fork(launch)
        if problem := launch_inputs.find_model_problem(launch, config, self.store.home):
            raise ConfigError(problem)
        launch_inputs.require_loadable_model(
            config.openai.model_name, self.store.home, profile=launch.profile
        )
        if launch.require_validation:
            gate.require_validation(
                self.tests, config, mixture.list_environment_files(environment, config)
            )
        PrefectApi()  # raises when no server is known, before anything is made
        return CheckedLaunch(environment, config, fork_source)

    def _resolve_with_fork(
        self, launch: LaunchRequest
    ) -> tuple[Environment, RunConfig, fork.ForkSource | None]:
        """Return the environment, its checked configuration, and the checkpoint to begin from, if
        there is one.
        """
        environment = discovery.find_environment(launch.environment)
        schema = discovery.load_schema(environment, self.schema_timeout_s)
        fields = launch.fields(schema)
        fork_source = fork.find_source(self.store, launch.start_from) if launch.start_from else None
        config = self._build_config(launch, schema, fields, fork_source)
        if fork_source:
            fork_source.require_compatible(launch.profile, config)
        validation_errors = self._find_validation_errors(environment, schema, launch, fields)
        if validation_errors:
            raise FieldValueError(
                f"{environment.name} refuses it: {'; '.join(validation_error['message'] for validation_error in validation_errors)}"
            )
        return environment, config, fork_source

    def preview(self, launch: LaunchRequest) -> tuple[RunConfig, ServicePlan]:
        """What a start would do: the configuration, and the services with ports that are free now.
        Nothing is written. What the profile lacks here is not looked at.
        """
        environment, config, _ = self._resolve_with_fork(launch)
        record = self._make_record(launch, environment, config, "RUN_ID")
        return config, make_training_plan(record, self.store.dir(record.run_id), config)

    def _build_config(
        self,
        launch: LaunchRequest,
        schema: EnvironmentSchema,
        fields: ConfigFields,
        fork_source: fork.ForkSource | None = None,
    ) -> RunConfig:
        """The profile's and the environment's values with the edits over them; base model and rank
        are those of `origin` where nobody has set them. Raises ConfigError.
        """
        model = launch_inputs.find_base_model(launch, [], fork_source, self.store.home)
        base_config = run_config.resolve_run_config(
            launch.environment, launch.profile, {}, defaults=schema.values, model=model
        )
        edits: dict[str, dict[str, Any]] = {}
        if fork_source:
            edits["tinker"] = {"lora_rank": fork_source.config.tinker.lora_rank}
        for name, value in launch.edits:
            field, checked_value = fields.check_edit(name, value, base_config)
            edits.setdefault(field.section, {})[field.name] = checked_value
        if launch.seed is not None:
            edits.setdefault("tinker", {})["seed"] = launch.seed
        examples_file = edits.get("tinker", {}).get("supervised_file")
        if examples_file is not None:
            edits["tinker"]["supervised_file"] = str(
                launch_inputs.resolve_examples_file(examples_file)
            )
        additional_environments = edits.get("env", {}).get("mixture", {})
        model = launch_inputs.find_base_model(
            launch, additional_environments, fork_source, self.store.home
        )
        config = run_config.resolve_run_config(
            launch.environment, launch.profile, edits, defaults=schema.values, model=model
        )
        return mixture.complete_mixture(config, self.schema_timeout_s)

    def start(self, launch: LaunchRequest, run_id: str | None = None) -> RunRecord:
        """Create a run and submit it; no run is left behind when this raises. With a `run_id` that
        exists already, because somebody was killed while starting it, that run is submitted.
        """
        run_id = run_id or self.store.new_id()
        if self.store.dir(run_id).record.is_file():
            record = self.store.load(run_id)
            return record if record.flow_run_id else launcher.submit_run(self.store, record)
        checked_launch = self.check(launch)
        config, fork_source = checked_launch.config, checked_launch.fork_source
        record = self._make_record(launch, checked_launch.environment, config, run_id)
        record = record.model_copy(update={"forked_from": fork_source and fork_source.name})
        try:
            if fork_source:
                fork_source.copy_into(self.store.dir(run_id))
            self.store.create(record, config.to_yaml())
            return launcher.submit_run(self.store, record)
        except BaseException:
            self.store.discard(record.run_id)
            raise

    def build_tiny_model(self, config: RunConfig, progress: build.ProgressCallback) -> None:
        """Make the tiny model, if this configuration needs it, while somebody watches; else the run
        does it.
        """
        if Path(config.openai.model_name) == launch_inputs.get_default_tiny_model_path(
            self.store.home
        ):
            build.ensure_tiny_model(build.TinyModelRecipe(), self.store.home, progress)

    def _make_record(
        self, launch: LaunchRequest, environment: Environment, config: RunConfig, run_id: str
    ) -> RunRecord:
        code_fingerprint, config_by_environment = (
            compute_fingerprint(Path(environment.file_path), config.env.model_extra or {}),
            config.build_environment_configs(),
        )
        forecast = (
            None if config.env.mixture else gate.find_forecast(self.tests, config, code_fingerprint)
        )
        additional_files = {
            name: file
            for name, file in mixture.list_environment_files(environment, config).items()
            if name != environment.name
        }
        return RunRecord(
            run_id=run_id,
            environment=environment.name,
            environment_file=environment.file_path,
            profile=launch.profile,
            base_model=config.openai.model_name,
            total_steps=config.env.total_steps,
            batch_size=config.env.batch_size,
            seed=config.tinker.seed,
            fingerprint=code_fingerprint,
            mixture={
                name: AdditionalEnvironment(
                    environment_file=file,
                    fingerprint=compute_fingerprint(
                        Path(file), config_by_environment[name].env.model_extra or {}
                    ),
                )
                for name, file in additional_files.items()
            },
            forecast=forecast.model_dump(mode="json") if forecast else None,
            require_validation=launch.require_validation,
            wandb_project=config.tinker.wandb_project,
            wandb_run_name=f"{environment.name}-{run_id}",
        )

    # --- inference tests
    # --------------------------------------------------------------------------------------------

    def check_test(
        self, launch: LaunchRequest, options: TestOptions
    ) -> tuple[CheckedLaunch, list[str]]:
        """Return the configuration and the models of an inference test that can start here; nothing
        is made.

        Raises what `start_test` would raise.
        """
        run_config.load_profile_values(launch.profile)
        environment = discovery.find_environment(launch.environment)
        schema = discovery.load_schema(environment, self.schema_timeout_s)
        config = self._build_config(launch, schema, launch.fields(schema))
        default_models = (
            [f"{EMBEDDED}{config.openai.model_name}"] if launch.profile == "embedded" else None
        )
        if options.models is None and (
            problem := launch_inputs.find_model_problem(launch, config, self.store.home)
        ):
            raise ConfigError(problem)
        model_names = options.models or default_models or [name for name, _, _ in DEFAULT_MODELS]
        model_names = [
            launch_inputs.resolve_tested_model(name, self.store.home) for name in model_names
        ]
        if any(name.startswith(EMBEDDED) for name in model_names):
            check_embedded()
        if remote_models := [name for name in model_names if not name.startswith(EMBEDDED)]:
            check_endpoint(remote_models, launcher.read_key_names())
        PrefectApi()  # raises when no server is known, before anything is made
        return CheckedLaunch(environment, config, None), model_names

    def start_test(self, launch: LaunchRequest, options: TestOptions) -> InferenceTest:
        """Submit an inference test of the environment, configured as this launch would be."""
        checked_launch, model_names = self.check_test(launch, options)
        environment, config = checked_launch.environment, checked_launch.config
        test = self.tests.create(
            InferenceRequest(
                environment=environment.name,
                environment_file=environment.file_path,
                **{
                    **options.model_dump(),
                    "models": model_names,
                    "num_steps": len(options.prompts or ()) or options.num_steps,
                },
            ),
            config.to_yaml(),
            class_name=environment.class_name,
            fingerprint=compute_fingerprint(
                Path(environment.file_path), config.env.model_extra or {}
            ),
            own_values=config.env.model_extra or {},
            planned=gate.make_planned_run(config),
        )
        try:
            launcher.submit_test(self.tests, test)
        except BaseException:
            self.tests.discard(test.test_id)
            raise
        return test

    def get_test(self, test_id: str) -> InferenceTest:
        """The test as it is now."""
        return launcher.refresh_test(self.tests, self.tests.load_and_fail_if_dead(test_id))

    # --- runs again
    # -------------------------------------------------------------------------------------------------

    def resume(self, run_id: str, limits: Json | None = None) -> RunRecord:
        """Continue an ended run from its newest complete checkpoint; a run that lives is returned
        as it is. `limits` are new values of its budgets, without which one that is used up would
        end it again at once.
        """
        record = self.get_run(run_id)
        if not record.has_ended:
            return record
        if record.status == "completed":
            raise RunStateError(
                f"run {run_id} has completed its {record.total_steps} steps; begin a new one from it to go on"
            )
        check_profile(record.profile, launcher.read_key_names())
        run_dir = self.store.dir(run_id)
        # raises where none is whole, before anything changes
        Checkpoints(run_dir.checkpoints).find_resumable()
        config = RunConfig.from_yaml(run_dir.config)
        if limits:
            config = replace_limits(config, limits, hint=fork.advice(record, run_dir, limits))
        steps = MetricsFile(run_dir.metrics).tail(1)
        exceeded_budget = find_exceeded_budget(
            config.limits,
            compute_budget_usage(
                record, steps[-1] if steps else {}, saved=read_spent_file(run_dir.spent)
            ),
        )
        if exceeded_budget:
            raise RunStateError(
                f"run {run_id} has used up its {exceeded_budget}; raise it to go on: `lachesis resume {run_id} --set "
                "limits.FIELD=VALUE`, or limits={...} of rl_start_training"
            )
        PrefectApi()  # raises when no server is known, before anything is changed
        if limits:
            write_private(run_dir.config, config.to_yaml())
        return resubmit_run(self.store, record, auto_resumes=0)

    def read_editable_values(self, record: RunRecord) -> Json:
        """The fields of the run that its profile lets be edited, with their values."""
        config = RunConfig.from_yaml(self.store.dir(record.run_id).config)
        return get_editable_values(config)

    def get_run(self, run_id: str) -> RunRecord:
        return launcher.refresh_run(self.store, self.store.load(run_id))

    def list_runs(self) -> list[RunRecord]:
        return self.list_runs_with_warning()[0]

    def list_runs_with_warning(self) -> tuple[list[RunRecord], str | None]:
        """All runs, the newest first, and what keeps their statuses from being up to date, if
        anything does.
        """
        records, unreadable = self.store.scan()
        observed_records, warning = launcher.refresh_runs(self.store, records)
        damage_warning = (
            unreadable
            and f"the records of these runs cannot be read: {', '.join(unreadable[:10])}; see {self.store.root}"
        )
        return refresh_newest_health(self.store, observed_records), "; ".join(
            text for text in (warning, damage_warning) if text
        ) or None

    def get_status(
        self, run_id: str, next_step_templates: Mapping[str, str] = NEXT_STEP_COMMANDS
    ) -> RunStatus:
        """How the run is doing; `words` are the next steps of the asking surface."""
        observed_records, warning = launcher.refresh_runs(self.store, [self.store.load(run_id)])
        record = refresh_health(self.store, observed_records[0])
        return build_run_status(
            record,
            self.store.dir(run_id),
            self.read_metrics(run_id),
            ui_url=launcher.get_run_url(record),
            queue=launcher.find_queue_position(self.store, run_id)
            if record.status == "pending"
            else None,
            warning=warning,
            next_step_templates=next_step_templates,
        )

    def read_metrics(self, run_id: str) -> list[Json]:
        """Every step of the run."""
        self.store.load(run_id)
        return MetricsFile(self.store.dir(run_id).metrics).read()

    def stop(self, run_id: str, *, now: bool = False) -> Json:
        """Ask the run to save a checkpoint and end; returns at once. With `now` its processes are
        given no time, which also ends a stop that takes too long.
        """
        record = self.get_run(run_id)
        # or the monitor would resume it
        if record.resume_wanted or (record.status == "failed" and not record.stop_reason):
            self.store.update(
                run_id,
                resume_wanted=False,
                stop_reason=record.stop_reason or launcher.STOPPED_BY_USER,
            )
        if record.has_ended:
            launcher.cancel_suspended_run(self.store, record)
            return {
                "message": f"run {run_id} is not running, and stays so",
                "run_id": run_id,
                "status": record.status,
            }
        if now:
            write_private(self.store.dir(run_id).stop_now_file, "")
        launcher.cancel_run(self.store, record)
        return {
            "message": f"run {run_id} is being stopped",
            "run_id": run_id,
            "status": self.get_run(run_id).status,
        }

    def get_results(
        self, run_id: str, next_step_templates: Mapping[str, str] = NEXT_STEP_COMMANDS
    ) -> RunResults:
        """Final metrics, a history of ten samples, held-out evaluation and the weights under typed
        names.
        """
        record = refresh_health(self.store, self.get_run(run_id))
        return build_run_results(
            record,
            self.store.dir(run_id),
            self.read_metrics(run_id),
            next_step_templates=next_step_templates,
        )

    def write_report(self, run_id: str, target: Path | None = None) -> list[Path]:
        """Write the run's report; the HTML file first, then its pictures. Raises StorageError."""
        from lachesis.reporting.html import write_report

        run_dir, record = self.store.dir(run_id), refresh_health(self.store, self.get_run(run_id))
        return write_report(
            record, run_dir, self.get_results(run_id), target or run_dir.path / "report"
        )

    def read_log(self, run_id: str, service: str, lines: int = 50) -> tuple[Path, str, int]:
        """The file, its last lines, and the position to read on from. `service` is a short name, as
        in a status. Raises ConfigError for one that the run has not.
        """
        log_files = find_log_files(self.store.load(run_id), self.store.dir(run_id))
        if service not in log_files:
            raise ConfigError(
                f"run {run_id} has no process {shorten(repr(service), 60)}; allowed: {', '.join(log_files)}"
            )
        path = Path(log_files[service])
        position = path.stat().st_size if path.exists() else 0
        return path, read_last_lines(path, lines), position
