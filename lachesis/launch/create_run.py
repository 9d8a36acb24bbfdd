"""Create a run from a resolved launch: its record, its configuration, and its provenance."""

from __future__ import annotations

import contextlib

from lachesis.base.files import write_private
from lachesis.base.tinker_client import get_base_url
from lachesis.config import mixture
from lachesis.config.backends import get_check_file
from lachesis.inference_tests.store import InferenceTestStore
from lachesis.launch.launch_places import uses_checked_server
from lachesis.launch.resolved_launch import ResolvedLaunch, make_run_record
from lachesis.runs.provenance import write_provenance
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore
from lachesis.spending import agent_limits
from lachesis.spending.confirmation import require_confirmation


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
    require_confirmation(launch, record.forecast)
    try:
        if launch.fork_source:
            launch.fork_source.copy_into(store.dir(run_id))
        # Two agents at once must not both get the last of the day's money.
        with contextlib.ExitStack() as stack:
            if not launch.request.by_owner:
                stack.enter_context(agent_limits.hold_spending_lock(store.home))
                agent_limits.restrict_run(launch.config, store)
            store.create(record, launch.config.to_yaml())
        if uses_checked_server(launch.config):
            check = get_check_file(get_base_url())
            write_private(store.dir(run_id).backend_check, check.read_text())
        files = mixture.list_environment_files(launch.environment, launch.config)
        write_provenance(store.dir(run_id), files, launch.config)
    except BaseException:
        store.discard(record.run_id)
        raise
    return record
