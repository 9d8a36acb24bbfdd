"""Report what a run needs and lacks here, and whether the tools can be offered."""

import contextlib
import sys
from pathlib import Path

from lachesis import __version__
from lachesis.agent_tools.answers import drop_empty
from lachesis.agent_tools.session import AgentSession, SessionState
from lachesis.base import paths
from lachesis.base.api_keys import read_key
from lachesis.base.errors import ConfigError, LachesisError
from lachesis.base.json_text import Json
from lachesis.config.installation_settings import get_default_profile
from lachesis.config.profiles import PROFILES, describe_missing_keys, load_profile_values
from lachesis.operations.environments import scan_environments
from lachesis.operations.launches import find_missing_keys
from lachesis.operations.server import (
    can_start_server,
    find_api_url,
    find_server_problem,
    get_max_runs,
)


def check_health(session: AgentSession) -> Json:
    """Return whether the parts that a run needs are there; missing parts raise no error."""
    server_problem = find_server_problem(session.store.home)
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
        missing = find_missing_keys(profile)
    except ConfigError as error:
        problems.append(str(error))
    scan = scan_environments()
    problems += [f"{file} does not parse: {reason}" for file, reason in scan.problems.items()]
    problems += [describe_missing_keys(profile, missing)] if missing else []
    return {
        "status": "degraded" if problems else "ok",
        "version": __version__,
        "problems": problems,
        "prefect_url": find_api_url(),
        "profile": profile,
        "missing_keys": missing,
        "environments_discovered": len(scan.environments),
        "current_environment": state.draft.environment if state.draft else None,
        "active_runs": [record.run_id for record in session.store.all() if not record.has_ended],
        "max_runs": get_max_runs(),
        "session": session.session_file.name,
        "home": str(paths.home()),
        **drop_empty(note=note),
    }


MIN_PYTHON = (3, 11)


def check_rl_python_version() -> bool:
    """Return whether this Python is new enough."""
    return sys.version_info >= MIN_PYTHON


def get_missing_keys() -> list[str]:
    """Return the names of the unset keys that the profile of $LACHESIS_PROFILE needs."""
    profile = get_default_profile()
    if profile not in PROFILES:
        return []
    return [key for key in find_missing_keys(profile) if not read_key(key)]


def check_rl_api_keys() -> bool:
    """Return whether the tools can be offered: new enough Python, keys of the profile set."""
    return check_rl_python_version() and not get_missing_keys()


def find_skill() -> Path | None:
    """Return the file of the skill that teaches an agent these tools, if the project is here."""
    with contextlib.suppress(LachesisError):
        file = paths.project_dir() / "skills" / "rl-training" / "SKILL.md"
        return file if file.is_file() else None
    return None
