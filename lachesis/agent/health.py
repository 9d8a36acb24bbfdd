"""Check that everything a training run needs is available, for an agent that asks."""

from __future__ import annotations

from lachesis import __version__
from lachesis.agent import schemas, views
from lachesis.agent.background_server import can_start_server
from lachesis.agent.session import AgentSession, get_default_profile
from lachesis.agent.session_store import SessionState
from lachesis.base import paths
from lachesis.base.errors import ConfigError, LachesisError
from lachesis.base.keys import describe_places
from lachesis.config.profiles import list_missing_keys, load_profile_values
from lachesis.orchestration import server
from lachesis.orchestration.server_info import find_api_url


def check_health(session: AgentSession) -> schemas.ServiceHealth:
    """Return whether the parts that a run needs are available; a missing part is reported, not
    raised.
    """
    server_problem = server.find_server_problem(session.service.store.home)
    problems, note = [], None
    if server_problem and can_start_server():
        note = (
            "no Prefect server runs here; the first tool that needs one starts it, which takes "
            "about 20 s"
        )
    elif server_problem:
        problems.append(server_problem)
    state = SessionState()
    try:
        state = session.session_file.read()
    except LachesisError as error:
        problems.append(str(error))
    profile = state.draft.profile if state.draft else get_default_profile()
    missing: list[str] = []
    try:
        load_profile_values(profile)
        missing = list_missing_keys(profile, server.read_key_names())
    except ConfigError as error:
        problems.append(str(error))
    scan = session.service.list_environments()
    problems += [f"{file} does not parse: {reason}" for file, reason in scan.problems.items()]
    problems += [
        f"profile {profile} needs {key} in the environment of `lachesis serve`, in "
        f"{describe_places()}"
        for key in missing
    ]
    return schemas.ServiceHealth(
        status="degraded" if problems else "ok",
        version=__version__,
        problems=problems,
        prefect_url=find_api_url(),
        profile=profile,
        missing_keys=missing,
        environments_discovered=len(scan.environments),
        current_environment=state.draft.environment if state.draft else None,
        active_runs=[
            record.run_id for record in session.service.store.all() if not record.has_ended
        ],
        max_runs=server.get_max_runs(),
        session=session.session_file.name,
        home=str(paths.home()),
        **views.drop_empty(note=note),
    )
