"""Complete `env.mixture`, the further environments of a run, before the run starts."""

from collections.abc import Mapping
from typing import Any

from lachesis.base.errors import FieldValueError
from lachesis.config.field_edits import ConfigFields
from lachesis.config.run_config import RunConfig, build_run_config
from lachesis.config.run_fields import EnvSection
from lachesis.environment_catalog import lookup
from lachesis.environment_catalog.scan import Environment

MIXTURE_FIELDS = ("weight", "max_token_length")
Values = dict[str, dict[str, Any]]


def complete_mixture(config: RunConfig, timeout_s: float) -> RunConfig:
    """Return the configuration with all fields of the further environments filled in and checked.

    Raises:
        UnknownEnvironmentError: There is no environment of a name.
        ConfigError: A field is unknown or locked, or a value is not allowed.
        EnvironmentLoadError: An environment cannot be imported.
    """
    if not config.env.mixture:
        return config
    values = config.model_dump()
    values["env"]["mixture"] = check_mixture(config.profile, config.env.mixture, timeout_s)
    return build_run_config(values)


def check_mixture(
    profile: str, mixture: Mapping[str, Mapping[str, Any]], timeout_s: float
) -> Values:
    """Return the environments with all their own fields, checked."""
    return {
        name: _complete_environment(profile, name, values, timeout_s)
        for name, values in mixture.items()
    }


def list_environment_files(environment: Environment, config: RunConfig) -> dict[str, str]:
    """Return the files of the run's environments by name, its first environment first.

    Raises:
        UnknownEnvironmentError: An environment no longer exists.
    """
    return {
        environment.name: environment.file_path,
        **{name: lookup.find_environment(name).file_path for name in config.env.mixture},
    }


def _complete_environment(
    profile: str, name: str, values: Mapping[str, Any], timeout_s: float
) -> dict[str, Any]:
    """Return the values of one environment of a mixture, checked and completed by its defaults."""
    environment = lookup.find_environment(name)
    schema = lookup.load_schema(environment, timeout_s)
    fields = ConfigFields(profile, schema)
    checked_values = {
        key: fields.check_edit(f"env.{key}", value)[1]
        for key, value in values.items()
        if key not in MIXTURE_FIELDS
    }
    validation_errors = lookup.check_values(environment, schema, checked_values, timeout_s)
    if validation_errors:
        reasons = "; ".join(error["message"] for error in validation_errors)
        raise FieldValueError(f"{name} refuses the values: {reasons}")
    defaults = {
        key: value for key, value in schema.values.items() if key not in EnvSection.model_fields
    }
    return {**defaults, **values, **checked_values}
