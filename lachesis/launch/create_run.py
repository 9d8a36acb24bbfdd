"""Create the record, configuration and provenance of a run or test from its resolved launch."""

from pathlib import Path

from lachesis.base.errors import LachesisError
from lachesis.base.files import write_private
from lachesis.base.json_text import Json
from lachesis.base.tinker_client import get_base_url
from lachesis.config.backends import get_check_file
from lachesis.config.prices import find_hourly_price
from lachesis.config.run_config import RunConfig
from lachesis.environment_catalog.fingerprint import compute_fingerprint
from lachesis.inference_tests import required_test
from lachesis.inference_tests.store import InferenceRequest, InferenceTest, InferenceTestStore
from lachesis.launch.resolve import ResolvedLaunch, ResolvedTest, uses_checked_server
from lachesis.runs.host_clock import make_host_fields
from lachesis.runs.provenance import write_provenance
from lachesis.runs.record import AdditionalEnvironment, RunRecord
from lachesis.runs.store import RunStore
from lachesis.spending import agent_limits
from lachesis.spending.confirmation import require_confirmation
from lachesis.spending.ledger import hold_ledger


def create_run(
    store: RunStore,
    tests: InferenceTestStore,
    launch: ResolvedLaunch,
    run_id: str,
    **changes: object,
) -> RunRecord:
    """Create a run that is not submitted; no run is left behind when this raises.

    Args:
        store: The runs of this home.
        tests: The tests of this home, for the forecast.
        launch: What was resolved and checked.
        run_id: The id of the run.
        changes: Further fields of its record.

    Raises:
        ConfirmationError: The run costs money, and its user has not agreed to that.
        PolicyError: Meanwhile agents have reserved so much that the owner's policy does not allow
            this run of an agent any more.
    """
    record = make_run_record(launch, run_id, tests).model_copy(update=changes)
    if not launch.confirmed:
        require_confirmation(launch.spec, record.forecast)
    try:
        if launch.fork_source:
            launch.fork_source.copy_into(store.dir(run_id))
        # Two agents at once must not both get the last of the day's money.
        with hold_ledger(store.home) as ledger:
            if launch.spec.by_agent:
                agent_limits.restrict_run(launch.config, store)
            ledger.promise_run(store, record, launch.config.limits.max_cost_usd)
            store.create(record, launch.config.to_yaml())
        if uses_checked_server(launch.config):
            check = get_check_file(get_base_url())
            write_private(store.dir(run_id).backend_check, check.read_text())
        write_provenance(store.dir(run_id), launch.environment_files, launch.config)
    except BaseException:
        discard_run(store, record)
        raise
    return record


def discard_run(store: RunStore, record: RunRecord) -> None:
    """Remove a run that was never submitted, and release its promised money."""
    store.discard(record.run_id)
    with hold_ledger(store.home) as ledger:
        ledger.withdraw(record.submission_key)


def make_run_record(launch: ResolvedLaunch, run_id: str, tests: InferenceTestStore) -> RunRecord:
    """Make the record of a run that starts with this launch; nothing is written."""
    environment, config, spec = launch.environment, launch.config, launch.spec
    fingerprint = _compute_fingerprint(environment.file_path, config)
    return RunRecord(
        run_id=run_id,
        spec=spec,
        name=spec.name,
        note=spec.note,
        tags=spec.tags,
        environment=environment.name,
        environment_file=environment.file_path,
        profile=spec.profile,
        base_model=config.openai.model_name,
        total_steps=config.env.total_steps,
        batch_size=config.env.batch_size,
        seed=config.tinker.seed,
        usd_per_hour=find_hourly_price(config.tinker.backend),
        fingerprint=fingerprint,
        additional_environments=_describe_additional_environments(launch),
        by_agent=spec.by_agent,
        forecast=_find_forecast(launch, fingerprint, tests),
        require_validation=launch.needs_validation,
        wandb_project=config.tinker.wandb_project,
        wandb_run_name=f"{environment.name}-{run_id}",
        forked_from=launch.fork_source and launch.fork_source.name,
        starts_from_base=launch.starts_from_base,
        **make_host_fields(),
    )


def _compute_fingerprint(file: str, config: RunConfig) -> str:
    return compute_fingerprint(Path(file), config.env.model_extra or {})


def _find_forecast(
    launch: ResolvedLaunch, fingerprint: str, tests: InferenceTestStore
) -> Json | None:
    """Return the forecast for a launch from the newest test of its code, or None."""
    # A test is about one environment, and several together take another amount.
    if launch.config.env.mixture:
        return None
    planned_run = required_test.make_planned_run(
        launch.config, starts_from_base=launch.starts_from_base
    )
    forecast = required_test.find_forecast(tests, launch.config, fingerprint, planned_run)
    if forecast is None:
        return None
    return forecast.model_dump(mode="json")


def _describe_additional_environments(launch: ResolvedLaunch) -> dict[str, AdditionalEnvironment]:
    """Return the file and fingerprint of each additional environment, by name."""
    configs = launch.config.build_environment_configs()
    return {
        name: AdditionalEnvironment(
            environment_file=file, fingerprint=_compute_fingerprint(file, configs[name])
        )
        for name, file in launch.environment_files.items()
        if name != launch.environment.name
    }


def create_test(tests: InferenceTestStore, resolved: ResolvedTest) -> InferenceTest:
    """Create the record of an inference test; nothing is submitted yet.

    Raises:
        PolicyError: Meanwhile agents have reserved so much that the owner's policy does not allow
            this test of an agent any more.
    """
    spec = resolved.spec
    with hold_ledger(tests.home) as ledger:
        if spec.by_agent:
            agent_limits.check_test(resolved.launch.config, spec, resolved.models, tests.home)
        test = _create_test_record(tests, resolved)
        try:
            ledger.promise(test.submission_key, resolved.max_cost_usd, by_agent=spec.by_agent)
        except LachesisError:
            tests.discard(test.test_id)
            raise
    return test


def discard_test(tests: InferenceTestStore, test: InferenceTest) -> None:
    """Remove a test that was never submitted, and release its promised money."""
    tests.discard(test.test_id)
    with hold_ledger(tests.home) as ledger:
        ledger.withdraw(test.submission_key)


def _create_test_record(tests: InferenceTestStore, resolved: ResolvedTest) -> InferenceTest:
    """Create the record of a test with all that it is about."""
    environment, config = resolved.launch.environment, resolved.launch.config
    return tests.create(
        InferenceRequest(
            environment=environment.name,
            environment_file=environment.file_path,
            models=resolved.models,
            spec=resolved.spec,
        ),
        config.to_yaml(),
        class_name=environment.class_name,
        fingerprint=_compute_fingerprint(environment.file_path, config),
        own_values=config.env.model_extra or {},
        planned=required_test.make_planned_run(
            config, starts_from_base=resolved.launch.starts_from_base
        ),
        max_token_length=config.env.max_token_length,
        prompt_settings=required_test.get_prompt_settings(config),
        max_cost_usd=resolved.max_cost_usd,
    )
