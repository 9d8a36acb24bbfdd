"""Describe, edit, check, preview and start launches, for all surfaces.

Each function takes the runs of the home that it is about, and raises only LachesisError for errors
that a user can cause.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lachesis.base.errors import ConfigError, FieldValueError, LachesisError
from lachesis.base.json_text import Json
from lachesis.config import mixture
from lachesis.config.field_edits import TOP_SECTION, ConfigField, describe_field
from lachesis.config.launch_spec import LaunchSpec
from lachesis.config.profiles import check_profile, list_missing_keys
from lachesis.config.run_config import RunConfig
from lachesis.environment_catalog.lookup import SCHEMA_TIMEOUT_S
from lachesis.inference_tests.store import InferenceTestStore
from lachesis.launch import choose_model, launch_file, preview, resolve
from lachesis.launch.choose_model import describe_default_model, require_loadable_model
from lachesis.launch.create_run import create_run, discard_run, make_run_record
from lachesis.launch.launch_file import make_launch_schema, render_launch_file
from lachesis.launch.offered_models import ModelList, OfferedModel, fetch_and_describe, list_models
from lachesis.launch.preview import LaunchPreview
from lachesis.launch.resolve import LaunchFields, ResolvedLaunch
from lachesis.prefect_client import background_serve, submit
from lachesis.prefect_client.resources import PrefectApi
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore
from lachesis.supervision.services.plan import ServicePlan
from lachesis.tiny_model import build

__all__ = [
    "LaunchFields",
    "LaunchPreview",
    "ModelList",
    "OfferedModel",
    "ResolvedLaunch",
    "ServicePlan",
    "describe_default_model",
    "fetch_and_describe",
    "list_models",
    "make_launch_schema",
    "render_launch_file",
    "require_loadable_model",
]


def describe_launch(
    store: RunStore, spec: LaunchSpec, *, schema_timeout_s: float = SCHEMA_TIMEOUT_S
) -> Json:
    """Describe one environment: its fields with the values that this launch would give them.

    The key `problem` says why the launch could not start, or is null.
    """
    launch_fields = resolve.read_launch_fields(spec, schema_timeout_s)
    problem = None
    try:
        config = launch_fields.build_config(store.home)
        errors = launch_fields.find_validation_errors()
        problem = "; ".join(error["message"] for error in errors) or None
        problem = problem or choose_model.find_model_problem(spec, config, store.home)
    except ConfigError as error:
        problem = str(error)
        config = launch_fields.build_config(store.home, with_edits=False)
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


def edit_launch(
    store: RunStore,
    spec: LaunchSpec,
    name: str,
    value: object,
    *,
    schema_timeout_s: float = SCHEMA_TIMEOUT_S,
) -> tuple[LaunchSpec, ConfigField, Any]:
    """Return the launch with one field changed, that field, and its checked value.

    A combination of fields that cannot work is reported by `describe_launch` and refused by
    `resolve_launch`.

    Raises:
        UnknownFieldError: There is no such field.
        LockedFieldError: The profile does not let the field be changed.
        FieldValueError: The value has the wrong type, or the environment refuses it.
    """
    launch_fields = resolve.read_launch_fields(spec, schema_timeout_s)
    base_config = launch_fields.build_config(store.home, with_edits=False)
    field, checked_value = launch_fields.fields.check_edit(name, value, base_config)
    key = f"{field.section}.{field.name}"
    if key == "env.mixture":
        mixture.check_mixture(spec.profile, checked_value, schema_timeout_s)
    changed = spec.model_copy(update={"settings": {**spec.settings, key: checked_value}})
    for error in replace(launch_fields, spec=changed).find_validation_errors():
        if error["field"] == field.name:
            raise FieldValueError(
                f"{launch_fields.environment.name} refuses it: {error['message']}"
            )
    return changed, field, checked_value


def read_fields(spec: LaunchSpec, *, schema_timeout_s: float = SCHEMA_TIMEOUT_S) -> LaunchFields:
    """Return the environment of a launch and the fields that whoever launches may edit."""
    return resolve.read_launch_fields(spec, schema_timeout_s)


def read_launch_file(file: Path, *, schema_timeout_s: float = SCHEMA_TIMEOUT_S) -> LaunchSpec:
    """Return the launch that a file describes; see `lachesis.launch.launch_file`."""
    return launch_file.read_launch_file(file, schema_timeout_s)


def make_similar_spec(
    store: RunStore,
    record: RunRecord,
    environment: str | None,
    *,
    schema_timeout_s: float = SCHEMA_TIMEOUT_S,
) -> LaunchSpec:
    """Return a launch like that of a run; see `lachesis.launch.launch_file`."""
    return launch_file.make_similar_spec(store, record, environment, schema_timeout_s)


def resolve_launch(
    store: RunStore, spec: LaunchSpec, *, schema_timeout_s: float = SCHEMA_TIMEOUT_S
) -> ResolvedLaunch:
    """Resolve a launch whose profile has its requirements here, without starting anything.

    Raises:
        LachesisError: The launch cannot start with these values.
    """
    key_names = background_serve.read_key_names()
    return resolve.resolve_at_place(spec, store, schema_timeout_s, key_names)


def check_launch(
    store: RunStore, spec: LaunchSpec, *, schema_timeout_s: float = SCHEMA_TIMEOUT_S
) -> ResolvedLaunch:
    """Resolve a launch and check everything that a start needs, without making anything.

    Raises:
        LachesisError: What `start_run` would raise: a value, a model that cannot be had, a
            validation that is missing, or a Prefect server that is not known.
    """
    tests, key_names = InferenceTestStore(store.home), background_serve.read_key_names()
    launch = resolve.check_launch(spec, store, tests, schema_timeout_s, key_names)
    PrefectApi()  # raises when no server is known, before anything is made
    return launch


def preview_launch(
    store: RunStore, spec: LaunchSpec, *, schema_timeout_s: float = SCHEMA_TIMEOUT_S
) -> LaunchPreview:
    """Return the preview of a start; nothing is written."""
    tests, key_names = InferenceTestStore(store.home), background_serve.read_key_names()
    return preview.preview_launch(spec, store, tests, schema_timeout_s, key_names)


def find_forecast(store: RunStore, launch: ResolvedLaunch) -> Json | None:
    """Return a launch's forecast by a test of its model and code, or None."""
    tests = InferenceTestStore(store.home)
    return make_run_record(launch, preview.PREVIEWED_ID, tests).forecast


def start_run(
    store: RunStore,
    launch: LaunchSpec | ResolvedLaunch,
    run_id: str | None = None,
    *,
    schema_timeout_s: float = SCHEMA_TIMEOUT_S,
) -> RunRecord:
    """Create a run and submit it; no run is left behind when this raises a LachesisError.

    Where Prefect's answer is not known, the run stays pending without a flow run, and is sent again
    by whoever looks at it.

    Args:
        store: The runs of the home.
        launch: A spec, or what `check_launch` has returned for it, which is not checked again.
        run_id: The id of the run; a new one by default. A run of this id that exists already,
            because an earlier start was killed, is submitted.
        schema_timeout_s: How long importing the environment may take.
    """
    run_id = run_id or store.new_id()
    if store.dir(run_id).record.is_file():
        record = store.load(run_id)
        if record.flow_run_id:
            return record
        return submit.submit_run(store, record)
    if isinstance(launch, LaunchSpec):
        resolved = check_launch(store, launch, schema_timeout_s=schema_timeout_s)
    else:
        resolved = launch
    record = create_run(store, InferenceTestStore(store.home), resolved, run_id)
    try:
        return submit.submit_run(store, record)
    except LachesisError:
        discard_run(store, record)
        raise


def build_tiny_model(store: RunStore, config: RunConfig, progress: build.ProgressCallback) -> None:
    """Build the tiny model with progress, if needed; otherwise the run builds it."""
    if Path(config.openai.model_name) == choose_model.get_default_tiny_model_path(store.home):
        build.ensure_tiny_model(build.TinyModelRecipe(), store.home, progress)


def find_missing_keys(profile: str) -> list[str]:
    """Return the profile's keys that the launcher, or else this process, lacks."""
    return list_missing_keys(profile, background_serve.read_key_names())


def require_keys(profile: str) -> None:
    """Raise MissingKeyError if a profile lacks a key, or MissingDependencyError a package."""
    check_profile(profile, background_serve.read_key_names())
