"""Check that a launch has what its place needs: keys, an installed back end, a server that fits."""

from __future__ import annotations

from lachesis.base.errors import ConfigError, MissingKeyError
from lachesis.base.tinker_client import get_base_url
from lachesis.config.backends import check_backend, find_check_problem, read_check
from lachesis.config.profiles import check_profile
from lachesis.config.run_config import RunConfig
from lachesis.launch.choose_model import LaunchRequest
from lachesis.launch.resolved_launch import ResolvedLaunch, resolve_launch
from lachesis.prefect_client import background_serve
from lachesis.runs.store import RunStore


def resolve_at_place(
    request: LaunchRequest, store: RunStore, schema_timeout_s: float
) -> ResolvedLaunch:
    """Resolve a launch whose place can train it; nothing is started.

    Raises:
        MissingKeyError: A key is not set.
        MissingDependencyError: A package, or the back end, is not installed.
        ConfigError: The server was checked, and does not fit or ignores a field of the run.
    """
    try:
        check_profile(request.profile, background_serve.read_key_names())
    except MissingKeyError:
        # With a back end no key is needed.
        launch = resolve_launch(request, store, schema_timeout_s)
        if not launch.config.tinker.backend:
            raise
    else:
        launch = resolve_launch(request, store, schema_timeout_s)
    check_backend(launch.config.tinker.backend)
    if uses_checked_server(launch.config):
        problem = find_check_problem(get_base_url(), launch.config.tinker.grad_clip_norm)
        if problem:
            raise ConfigError(problem)
    return launch


def uses_checked_server(config: RunConfig) -> bool:
    """Return whether the run trains on a server that `lachesis backend check` may have checked."""
    return (
        config.profile == "custom"
        and not config.tinker.backend
        and read_check(get_base_url()) is not None
    )
