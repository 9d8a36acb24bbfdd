"""Resolve a launch once: find its environment, read its fields, and complete its configuration.

What `resolve_launch` returns travels down to whatever previews, checks or starts the launch, so
that an environment is imported once and its configuration is made once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lachesis.base.errors import ConfigError, FieldValueError
from lachesis.base.json_text import Json
from lachesis.checkpoints import start_from_checkpoint
from lachesis.checkpoints.start_from_checkpoint import ForkSource
from lachesis.config import mixture, profiles
from lachesis.config.field_edits import ConfigFields
from lachesis.config.launch_spec import make_parameters, make_test_parameters
from lachesis.config.owner_policy import load_policy
from lachesis.config.prices import find_hourly_price
from lachesis.config.profiles import check_embedded, check_endpoint, check_profile
from lachesis.config.run_config import RunConfig, resolve_run_config
from lachesis.environment_catalog import lookup
from lachesis.environment_catalog.fingerprint import compute_fingerprint
from lachesis.environment_catalog.lookup import EnvironmentSchema
from lachesis.environment_catalog.scan import Environment
from lachesis.inference_tests import required_test
from lachesis.inference_tests.store import (
    DEFAULT_MODELS,
    EMBEDDED,
    TINKER,
    InferenceRequest,
    InferenceTest,
    InferenceTestStore,
    TestOptions,
    make_tested_name,
)
from lachesis.launch import choose_model
from lachesis.launch.choose_model import LaunchRequest
from lachesis.prefect_client import background_serve
from lachesis.prefect_client.resources import PrefectApi
from lachesis.runs.record import AdditionalEnvironment, RunRecord
from lachesis.runs.store import RunStore
from lachesis.spending import agent_limits
from lachesis.supervision.services.plan import ServicePlan, make_training_plan


@dataclass(frozen=True)
class LaunchFields:
    """The environment of a launch, and the fields that whoever launches may edit."""

    request: LaunchRequest
    environment: Environment
    schema: EnvironmentSchema
    fields: ConfigFields
    schema_timeout_s: float

    def build_config(
        self, home: Path, fork_source: ForkSource | None = None, *, with_edits: bool = True
    ) -> RunConfig:
        """Build the configuration: the profile's and the environment's values, then the edits.

        The base model and the LoRA rank of `fork_source` are the defaults where it is given.

        Raises:
            ConfigError: A value, or the combination of several, cannot work.
        """
        if with_edits:
            request = self.request
        else:
            request = replace(self.request, edits=())
        model = choose_model.find_base_model(request, [], fork_source, home)
        base_config = resolve_run_config(
            request.environment, request.profile, {}, defaults=self.schema.values, model=model
        )
        edits = self._collect_edits(request, base_config, fork_source)
        additional_environments = edits.get("env", {}).get("mixture", {})
        model = choose_model.find_base_model(request, additional_environments, fork_source, home)
        config = resolve_run_config(
            request.environment, request.profile, edits, defaults=self.schema.values, model=model
        )
        return mixture.complete_mixture(config, self.schema_timeout_s)

    def _collect_edits(
        self, request: LaunchRequest, base_config: RunConfig, fork_source: ForkSource | None
    ) -> dict[str, dict[str, Any]]:
        """Return the checked edits by section and field."""
        edits: dict[str, dict[str, Any]] = {}
        if fork_source:
            edits["tinker"] = {"lora_rank": fork_source.config.tinker.lora_rank}
        for name, value in request.edits:
            field, checked_value = self.fields.check_edit(name, value, base_config)
            edits.setdefault(field.section, {})[field.name] = checked_value
        if request.seed is not None:
            edits.setdefault("tinker", {})["seed"] = request.seed
        examples_file = edits.get("tinker", {}).get("sft_file")
        if examples_file is not None:
            resolved_file = choose_model.resolve_examples_file(examples_file)
            edits["tinker"]["sft_file"] = str(resolved_file)
        return edits

    def list_set_fields(self, config: RunConfig) -> dict[str, Any]:
        """Return the values of the fields that this launch sets, by SECTION.FIELD."""
        fields = [self.fields.find(name) for name, _ in self.request.edits]
        if self.request.seed is not None:
            fields.append(self.fields.find("tinker.seed"))
        values = config.model_dump(mode="json")
        return {
            f"{field.section}.{field.name}": values[field.section][field.name] for field in fields
        }

    def list_warnings(self) -> tuple[str, ...]:
        """Return a warning for each field that the owner sets and agents may not."""
        fields = [self.fields.find(name) for name, _ in self.request.edits]
        return tuple(
            f"{field.section}.{field.name} is locked for agents ({field.agent_lock_reason}); it is "
            "set because you own this installation"
            for field in fields
            if field.agent_lock_reason is not None
        )

    def find_validation_errors(self) -> list[dict[str, str]]:
        """Return the objections of the environment's own validators to the edited values.

        The validators run in a child process, never in this one.
        """
        edited_fields = [(self.fields.find(name), value) for name, value in self.request.edits]
        environment_values = {
            field.name: self.fields.parse_value(field, value)
            for field, value in edited_fields
            if field.section == "env"
        }
        return lookup.check_values(
            self.environment, self.schema, environment_values, self.schema_timeout_s
        )


@dataclass(frozen=True)
class ResolvedLaunch:
    """A launch with everything that was looked up for it."""

    request: LaunchRequest
    environment: Environment
    config: RunConfig
    fork_source: ForkSource | None = None
    """The checkpoint of another run that this one begins from."""
    set_fields: Mapping[str, Any] = field(default_factory=dict)
    """The values that the user has set, by SECTION.FIELD."""
    warnings: tuple[str, ...] = ()
    """What the owner should know about fields that agents may not set."""


@dataclass(frozen=True)
class LaunchPreview:
    """Hold what a start would make of a launch."""

    launch: ResolvedLaunch
    record: RunRecord
    plan: ServicePlan


@dataclass(frozen=True)
class ResolvedTest:
    """An inference test that can start: its launch, and the models it compares."""

    launch: ResolvedLaunch
    models: list[str]
    max_cost_usd: float | None = None
    """The most that it can cost in US dollars; None if it is free or no price is known."""


def read_launch_fields(request: LaunchRequest, schema_timeout_s: float) -> LaunchFields:
    """Find the environment of a launch and read the fields that can be edited.

    Raises:
        ConfigError: There is no such profile.
        UnknownEnvironmentError: There is no such environment.
        EnvironmentLoadError: The environment cannot be imported.
        PolicyError: The owner's policy does not let agents use the environment or the profile.
    """
    profiles.load_profile_values(request.profile)
    environment = lookup.find_environment(request.environment)
    if not request.by_owner:
        policy = load_policy()
        policy.require_profile(request.profile)
        policy.require_environments([environment.name])
    schema = lookup.load_schema(environment, schema_timeout_s)
    return LaunchFields(request, environment, schema, request.fields(schema), schema_timeout_s)


def resolve_launch(
    request: LaunchRequest, store: RunStore, schema_timeout_s: float
) -> ResolvedLaunch:
    """Resolve a launch for training.

    Raises:
        LachesisError: The environment, a value or the checkpoint to begin from does not fit.
    """
    launch_fields = read_launch_fields(request, schema_timeout_s)
    if request.start_from:
        fork_source = start_from_checkpoint.find_source(store, request.start_from)
    else:
        fork_source = None
    config = launch_fields.build_config(store.home, fork_source)
    if fork_source:
        fork_source.require_compatible(request.profile, config)
    if errors := launch_fields.find_validation_errors():
        reasons = "; ".join(error["message"] for error in errors)
        raise FieldValueError(f"{launch_fields.environment.name} refuses it: {reasons}")
    if not request.by_owner:
        config = agent_limits.restrict_run(config, store)
    return ResolvedLaunch(
        request,
        launch_fields.environment,
        config,
        fork_source,
        launch_fields.list_set_fields(config),
        launch_fields.list_warnings(),
    )


def make_run_record(launch: ResolvedLaunch, run_id: str, tests: InferenceTestStore) -> RunRecord:
    """Make the record of a run that starts with this launch; nothing is written."""
    environment, config = launch.environment, launch.config
    fingerprint = compute_fingerprint(Path(environment.file_path), config.env.model_extra or {})
    return RunRecord(
        run_id=run_id,
        name=launch.request.name,
        note=launch.request.note,
        tags=list(launch.request.tags),
        environment=environment.name,
        environment_file=environment.file_path,
        profile=launch.request.profile,
        base_model=config.openai.model_name,
        total_steps=config.env.total_steps,
        batch_size=config.env.batch_size,
        seed=config.tinker.seed,
        usd_per_hour=find_hourly_price(config.tinker.backend),
        fingerprint=fingerprint,
        additional_environments=_describe_additional_environments(launch),
        set_fields=dict(launch.set_fields),
        parameters=make_parameters(
            launch.request, environment.file_path, launch.set_fields, run_id
        ),
        forecast=_find_forecast(config, fingerprint, tests),
        require_validation=launch.request.needs_validation,
        wandb_project=config.tinker.wandb_project,
        wandb_run_name=f"{environment.name}-{run_id}",
        forked_from=launch.fork_source and launch.fork_source.name,
    )


def _find_forecast(config: RunConfig, fingerprint: str, tests: InferenceTestStore) -> Json | None:
    # A test is about one environment, and several together take another amount.
    if config.env.mixture:
        return None
    forecast = required_test.find_forecast(tests, config, fingerprint)
    if forecast is None:
        return None
    return forecast.model_dump(mode="json")


def preview_launch(
    request: LaunchRequest, store: RunStore, tests: InferenceTestStore, schema_timeout_s: float
) -> LaunchPreview:
    """Return the record and the services that a start would have; nothing is written.

    The ports are free now. Keys and packages that the profile needs are not checked.

    Raises:
        LachesisError: The launch cannot start with these values.
    """
    launch = resolve_launch(request, store, schema_timeout_s)
    record = make_run_record(launch, "RUN_ID", tests)
    plan = make_training_plan(record, store.dir(record.run_id), launch.config)
    return LaunchPreview(launch, record, plan)


def _describe_additional_environments(launch: ResolvedLaunch) -> dict[str, AdditionalEnvironment]:
    """Return the file and fingerprint of each environment beside the first one, by name."""
    configs = launch.config.build_environment_configs()
    files = mixture.list_environment_files(launch.environment, launch.config)
    return {
        name: AdditionalEnvironment(
            environment_file=file,
            fingerprint=compute_fingerprint(Path(file), configs[name].env.model_extra or {}),
        )
        for name, file in files.items()
        if name != launch.environment.name
    }


def resolve_test(
    request: LaunchRequest, options: TestOptions, home: Path, schema_timeout_s: float
) -> ResolvedTest:
    """Resolve an inference test and check what it needs to start, without making anything.

    Raises:
        LachesisError: A value or a model cannot be used, a key is missing, or no server is known.
    """
    launch_fields = read_launch_fields(request, schema_timeout_s)
    config = launch_fields.build_config(home)
    model_names = options.models
    if model_names is None:
        if problem := choose_model.find_model_problem(request, config, home):
            raise ConfigError(problem)
        model_names = _list_default_tested_models(request.profile, config)
    _check_tested_places(request.profile, model_names)
    model_names = [choose_model.resolve_tested_model(name, home) for name in model_names]
    max_cost_usd = agent_limits.compute_max_test_cost(config, options, model_names)
    if not request.by_owner:
        agent_limits.check_test(config, options, model_names, home)
    PrefectApi()  # raises when no server is known, before anything is made
    launch = ResolvedLaunch(
        request,
        launch_fields.environment,
        config,
        set_fields=launch_fields.list_set_fields(config),
        warnings=launch_fields.list_warnings(),
    )
    return ResolvedTest(launch, model_names, max_cost_usd)


def _list_default_tested_models(profile: str, config: RunConfig) -> list[str]:
    """Return the model that would be trained; without a key to sample it, the endpoint's default
    models if there is a key for these.
    """
    # An agent with a key of OpenRouter alone could test before Tinker was asked.
    key_names = background_serve.read_key_names()
    if profiles.list_missing_keys(profile, key_names) and profiles.has_endpoint_key(key_names):
        return [name for name, _, _ in DEFAULT_MODELS]
    return [make_tested_name(config.openai.model_name, profile)]


def _check_tested_places(profile: str, model_names: list[str]) -> None:
    """Check that each model of a test can be sampled at its place.

    Raises:
        LachesisError: A package or a key is missing, or the profile has no Tinker server.
    """
    if any(name.startswith(EMBEDDED) for name in model_names):
        check_embedded()
    key_names = background_serve.read_key_names()
    if tinker_models := [name for name in model_names if name.startswith(TINKER)]:
        if profile == "embedded":
            raise ConfigError(
                f"{tinker_models[0]} is sampled by a Tinker server, and profile embedded has none; "
                "allowed: profile tinker or custom, or embedded:NAME"
            )
        check_profile(profile, key_names)
    if endpoint_models := [name for name in model_names if not name.startswith((EMBEDDED, TINKER))]:
        check_endpoint(endpoint_models, key_names)


def create_inference_test(
    tests: InferenceTestStore, resolved: ResolvedTest, options: TestOptions
) -> InferenceTest:
    """Create the record of an inference test; nothing is submitted yet."""
    config = resolved.launch.config
    values = {
        **options.model_dump(),
        "models": resolved.models,
        "num_steps": len(options.prompts or ()) or options.num_steps,
    }
    with contextlib.ExitStack() as stack:
        if not resolved.launch.request.by_owner:
            # What was reserved since the test was checked counts too.
            stack.enter_context(agent_limits.hold_spending_lock(tests.home))
            agent_limits.check_test(config, options, resolved.models, tests.home)
        return _create_test_record(tests, resolved, options, values)


def _create_test_record(
    tests: InferenceTestStore, resolved: ResolvedTest, options: TestOptions, values: Json
) -> InferenceTest:
    environment, config = resolved.launch.environment, resolved.launch.config
    own_values = config.env.model_extra or {}
    return tests.create(
        InferenceRequest(
            environment=environment.name, environment_file=environment.file_path, **values
        ),
        config.to_yaml(),
        class_name=environment.class_name,
        fingerprint=compute_fingerprint(Path(environment.file_path), own_values),
        own_values=own_values,
        planned=required_test.make_planned_run(config),
        max_token_length=config.env.max_token_length,
        prompt_settings=required_test.get_prompt_settings(config),
        max_cost_usd=resolved.max_cost_usd,
        parameters=make_test_parameters(
            resolved.launch.request, options, environment.file_path, resolved.launch.set_fields
        ),
    )
