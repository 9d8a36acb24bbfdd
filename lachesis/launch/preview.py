"""Preview a launch: the record with the forecast, the services, and missing requirements."""

from dataclasses import dataclass

from lachesis.config.launch_spec import LaunchSpec
from lachesis.config.profiles import list_missing_keys
from lachesis.inference_tests.store import InferenceTestStore
from lachesis.launch.choose_model import KeyNames, find_model_problem
from lachesis.launch.create_run import make_run_record
from lachesis.launch.resolve import ResolvedLaunch, resolve_launch
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore
from lachesis.supervision.services.plan import ServicePlan, make_training_plan

# Stands for the id that the run would get.
PREVIEWED_ID = "RUN_ID"


@dataclass(frozen=True)
class LaunchPreview:
    """Hold the record, the services and the problem of a launch that was not started."""

    launch: ResolvedLaunch
    record: RunRecord
    plan: ServicePlan
    problem: str | None
    """Why it cannot start now, if so; the rest of the preview helps to mend it."""


def preview_launch(
    spec: LaunchSpec,
    store: RunStore,
    tests: InferenceTestStore,
    schema_timeout_s: float,
    key_names: KeyNames,
) -> LaunchPreview:
    """Return the record and the services that a start would have; nothing is written.

    The ports are free now.

    Raises:
        LachesisError: The launch cannot start with these values.
    """
    launch = resolve_launch(spec, store, schema_timeout_s)
    record = make_run_record(launch, PREVIEWED_ID, tests)
    plan = make_training_plan(record, store.dir(record.run_id), launch.config)
    problem = find_model_problem(launch.spec, launch.config, store.home)
    if missing_keys := list_missing_keys(spec.profile, key_names):
        problem = f"{', '.join(missing_keys)} is not known to `lachesis serve`"
    return LaunchPreview(launch, record, plan, problem)
