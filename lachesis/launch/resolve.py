"""Resolve a launch once: find its environment, read its fields, and complete its configuration.

What `resolve_launch` returns travels down to whatever previews, checks or starts the launch, so
that an environment is imported once and its configuration is made once. Nothing here asks Prefect:
which keys `lachesis serve` has is passed in, as names with the value "set", or None without one.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lachesis.base.errors import ConfigError, FieldValueError, MissingKeyError
from lachesis.base.tinker_client import get_base_url
from lachesis.checkpoints import start_from_checkpoint
from lachesis.checkpoints.start_from_checkpoint import ForkSource
from lachesis.config import mixture, profiles
from lachesis.config.backends import check_backend, find_check_problem, read_check
from lachesis.config.field_edits import ConfigFields
from lachesis.config.launch_spec import LaunchSpec, TestSpec
from lachesis.config.owner_policy import load_policy
from lachesis.config.profiles import PROFILES, check_profile
from lachesis.config.run_config import RunConfig, check_template_settings, resolve_run_config
from lachesis.environment_catalog import lookup
from lachesis.environment_catalog.lookup import EnvironmentSchema
from lachesis.environment_catalog.scan import Environment
from lachesis.inference_tests import required_test
from lachesis.inference_tests.store import InferenceTestStore
from lachesis.launch import choose_model, offered_models
from lachesis.launch.choose_model import KeyNames
from lachesis.runs.store import RunStore
from lachesis.spending import agent_limits


@dataclass(frozen=True)
class LaunchFields:
    """The environment of a launch, and the fields that whoever launches may edit."""

    spec: LaunchSpec
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
        name, edits = self.environment.name, self.spec.list_edits() if with_edits else {}
        find_model = functools.partial(
            choose_model.find_base_model, self.spec, name, fork_source=fork_source, home=home
        )
        resolve = functools.partial(
            resolve_run_config, name, self.spec.profile, defaults=self.schema.values
        )
        # A locked field is refused with the value that it has.
        checked_edits = self._check_edits(edits, resolve({}, model=find_model([])), fork_source)
        further_environments = checked_edits.get("env", {}).get("mixture", {})
        config = resolve(checked_edits, model=find_model(further_environments))
        return mixture.complete_mixture(config, self.schema_timeout_s)

    def _check_edits(
        self, edits: Mapping[str, Any], base_config: RunConfig, fork_source: ForkSource | None
    ) -> dict[str, dict[str, Any]]:
        """Return the checked edits by section and field."""
        checked: dict[str, dict[str, Any]] = {}
        if fork_source:
            checked["tinker"] = {"lora_rank": fork_source.config.tinker.lora_rank}
        for name, value in edits.items():
            if self._states_locked_value(name, value, base_config):
                continue
            field, checked_value = self.fields.check_edit(name, value, base_config)
            checked.setdefault(field.section, {})[field.name] = checked_value
        examples_file = checked.get("tinker", {}).get("sft_file")
        if examples_file is not None:
            resolved_file = choose_model.resolve_examples_file(examples_file)
            checked["tinker"]["sft_file"] = str(resolved_file)
        return checked

    def _states_locked_value(self, name: str, value: object, base_config: RunConfig) -> bool:
        """Return whether an edit gives a locked field the value of the profile."""
        field = self.fields.find(name)
        section = getattr(base_config, field.section, None)
        return (
            field.lock_reason is not None
            and section is not None
            and self.fields.parse_value(field, value) == getattr(section, field.name, None)
        )

    def list_set_fields(self, config: RunConfig) -> dict[str, Any]:
        """Return the values of the fields that this launch sets, by SECTION.FIELD."""
        values = config.model_dump(mode="json")
        fields = [self.fields.find(name) for name in self.spec.list_edits()]
        return {
            f"{field.section}.{field.name}": values[field.section][field.name] for field in fields
        }

    def list_changed_fields(
        self, config: RunConfig, home: Path, fork_source: ForkSource | None
    ) -> dict[str, Any]:
        """Return the set fields without those that have this value also if they are left out."""
        set_fields = self.list_set_fields(config)
        defaults = self.build_config(home, fork_source, with_edits=False).model_dump(mode="json")
        changed_fields = {}
        for name, value in set_fields.items():
            section, _, field = name.partition(".")
            if value != defaults[section].get(field):
                changed_fields[name] = value
        # A value may follow from others that are set.
        reduced = replace(self, spec=self.spec.with_set_fields(changed_fields))
        if _is_same_config(reduced.build_config(home, fork_source), config):
            return changed_fields
        return set_fields

    def complete_spec(
        self, config: RunConfig, home: Path, fork_source: ForkSource | None = None
    ) -> LaunchSpec:
        """Return the spec in the form in which it is kept: it says the same in any folder and
        program, with each value in the type of its field and under one name.
        """
        model = self.spec.model
        if model is not None and model != choose_model.TINY_MODEL:
            model = choose_model.resolve_model(model, home)
        set_fields = self.list_changed_fields(config, home, fork_source)
        return self.spec.with_set_fields(set_fields).model_copy(
            update={
                "environment": lookup.get_name_or_file(
                    self.environment.name, self.environment.file_path
                ),
                "model": model,
                "confirmed": False,
            }
        )

    def list_warnings(self) -> tuple[str, ...]:
        """Return a warning for each field that the owner sets and agents may not."""
        fields = [self.fields.find(name) for name in self.spec.list_edits()]
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
        edited_fields = [
            (self.fields.find(name), value) for name, value in self.spec.list_edits().items()
        ]
        environment_values = {
            field.name: self.fields.parse_value(field, value)
            for field, value in edited_fields
            if field.section == "env"
        }
        return lookup.check_values(
            self.environment, self.schema, environment_values, self.schema_timeout_s
        )


def drop_defaults(spec: LaunchSpec, home: Path, schema_timeout_s: float) -> LaunchSpec:
    """Return the spec without the values that its profile gives in any case.

    A launch file states them all, and options may put another profile in the place of its own.
    """
    launch_fields = read_launch_fields(spec, schema_timeout_s)
    config = launch_fields.build_config(home)
    return spec.with_set_fields(launch_fields.list_changed_fields(config, home, None))


def _is_same_config(one: RunConfig, other: RunConfig) -> bool:
    """Return whether two configurations differ at most in the names that W&B shows."""
    own_names = {"env": {"wandb_name"}}
    return one.model_dump(exclude=own_names) == other.model_dump(exclude=own_names)


@dataclass(frozen=True)
class ResolvedLaunch:
    """A launch with everything that was looked up for it."""

    spec: LaunchSpec
    """What was asked for, in the form in which it is kept."""
    environment: Environment
    config: RunConfig
    fork_source: ForkSource | None = None
    """The checkpoint of another run that this one begins from."""
    warnings: tuple[str, ...] = ()
    """What the owner should know about fields that agents may not set."""
    confirmed: bool = False
    """Whether the user has agreed to what a paid launch costs."""

    @property
    def environment_files(self) -> dict[str, str]:
        """Return the files of the run's environments by name, its first environment first."""
        return mixture.list_environment_files(self.environment, self.config)

    @property
    def starts_from_base(self) -> bool:
        """Return whether the first step begins with the unchanged base model."""
        return self.fork_source is None and self.config.tinker.sft_file is None

    @property
    def needs_validation(self) -> bool:
        """Return whether the launch needs a recent test that found its environment learnable."""
        if not PROFILES[self.spec.profile].is_paid:
            return self.spec.require_validation
        if self.spec.by_agent:
            return load_policy().require_validation
        return not self.spec.without_validation


@dataclass(frozen=True)
class ResolvedTest:
    """An inference test that can start: its spec with its models, and the launch it is about."""

    spec: TestSpec
    launch: ResolvedLaunch
    models: list[str]
    max_cost_usd: float | None = None
    """The most that it can cost in US dollars; None if it is free or no price is known."""


def read_launch_fields(spec: LaunchSpec, schema_timeout_s: float) -> LaunchFields:
    """Find the environment of a launch and read the fields that can be edited.

    Raises:
        ConfigError: There is no such profile.
        UnknownEnvironmentError: There is no such environment.
        EnvironmentLoadError: The environment cannot be imported.
        PolicyError: The owner's policy does not let agents use the environment or the profile.
    """
    profiles.load_profile_values(spec.profile)
    environment = lookup.find_environment(lookup.register_environment(spec.environment))
    if spec.by_agent:
        policy = load_policy()
        policy.require_profile(spec.profile)
        policy.require_environments([environment.name])
    schema = lookup.load_schema(environment, schema_timeout_s)
    fields = ConfigFields(spec.profile, schema, is_owner=not spec.by_agent)
    return LaunchFields(spec, environment, schema, fields, schema_timeout_s)


def resolve_launch(spec: LaunchSpec, store: RunStore, schema_timeout_s: float) -> ResolvedLaunch:
    """Return a launch for training whose values and checkpoint were checked and completed.

    Raises:
        LachesisError: The environment, a value or the checkpoint to begin from does not fit.
    """
    if spec.require_validation and spec.without_validation:
        raise ConfigError(
            "require_validation and without_validation exclude each other; set one of them"
        )
    launch_fields = read_launch_fields(spec, schema_timeout_s)
    fork_source = None
    if spec.from_checkpoint:
        fork_source = start_from_checkpoint.find_source(store, spec.from_checkpoint)
    config = launch_fields.build_config(store.home, fork_source)
    if fork_source:
        fork_source.require_compatible(spec.profile, config)
    if errors := launch_fields.find_validation_errors():
        reasons = "; ".join(error["message"] for error in errors)
        raise FieldValueError(f"{launch_fields.environment.name} refuses it: {reasons}")
    complete_spec = launch_fields.complete_spec(config, store.home, fork_source)
    if spec.by_agent:
        config = agent_limits.restrict_run(config, store)
    return ResolvedLaunch(
        complete_spec,
        launch_fields.environment,
        config,
        fork_source,
        launch_fields.list_warnings(),
        spec.confirmed,
    )


def resolve_at_place(
    spec: LaunchSpec, store: RunStore, schema_timeout_s: float, key_names: KeyNames
) -> ResolvedLaunch:
    """Resolve a launch at a place that has its requirements: keys, a back end, a suitable server.

    Raises:
        MissingKeyError: A key is not set.
        MissingDependencyError: A package, or the back end, is not installed.
        ConfigError: The server was checked, and does not fit or ignores a field of the run.
    """
    try:
        check_profile(spec.profile, key_names)
    except MissingKeyError:
        # With a back end no key is needed.
        launch = resolve_launch(spec, store, schema_timeout_s)
        if not launch.config.tinker.backend:
            raise
    else:
        launch = resolve_launch(spec, store, schema_timeout_s)
    check_backend(launch.config.tinker.backend)
    if uses_checked_server(launch.config):
        problem = find_check_problem(get_base_url(), launch.config.tinker.grad_clip_norm)
        if problem:
            raise ConfigError(problem)
    return launch


def check_launch(
    spec: LaunchSpec,
    store: RunStore,
    tests: InferenceTestStore,
    schema_timeout_s: float,
    key_names: KeyNames,
) -> ResolvedLaunch:
    """Resolve a launch and check everything that a start needs here, without making anything.

    Raises:
        LachesisError: A value does not fit, a model cannot be had, or a test is missing.
    """
    launch = resolve_at_place(spec, store, schema_timeout_s, key_names)
    config, home = launch.config, store.home
    if problem := choose_model.find_model_problem(launch.spec, config, home):
        raise ConfigError(problem)
    choose_model.require_loadable_model(config.openai.model_name, home, profile=spec.profile)
    choose_model.require_trackers(config)
    check_template_settings(config)
    if launch.needs_validation:
        files, set_fields = launch.environment_files, launch.spec.list_edits()
        required_test.require_validation(tests, config, files, set_fields)
    offered_models.require_offered_model(spec.profile, config.openai.model_name)
    return launch


def uses_checked_server(config: RunConfig) -> bool:
    """Return whether the run trains on a server that `lachesis backend check` may have checked."""
    return (
        config.profile == "custom"
        and not config.tinker.backend
        and read_check(get_base_url()) is not None
    )


def resolve_test(
    spec: TestSpec, home: Path, schema_timeout_s: float, key_names: KeyNames
) -> ResolvedTest:
    """Resolve an inference test and check its requirements, without creating anything.

    Raises:
        LachesisError: A value or a model cannot be used, or a key is missing.
    """
    launch_fields = read_launch_fields(spec.to_launch(), schema_timeout_s)
    config = launch_fields.build_config(home)
    model_names = spec.models
    if model_names is None:
        if problem := choose_model.find_model_problem(launch_fields.spec, config, home):
            raise ConfigError(problem)
        model_names = choose_model.list_default_tested_models(spec.profile, config, key_names)
    choose_model.check_tested_places(spec.profile, model_names, key_names)
    model_names = [choose_model.resolve_tested_model(name, home) for name in model_names]
    max_cost_usd = agent_limits.compute_max_test_cost(config, spec, model_names)
    if spec.by_agent:
        agent_limits.check_test(config, spec, model_names, home)
    launch = ResolvedLaunch(
        launch_fields.complete_spec(config, home),
        launch_fields.environment,
        config,
        warnings=launch_fields.list_warnings(),
    )
    complete_spec = spec.model_copy(
        update={
            "environment": launch.spec.environment,
            "model": launch.spec.model,
            "settings": dict(sorted(launch.spec.list_edits().items())),
        }
    )
    return ResolvedTest(complete_spec, launch, model_names, max_cost_usd)
