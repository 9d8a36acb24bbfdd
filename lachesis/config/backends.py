"""List the engines of others that profile custom can train on, and what each needs on this machine.

`tinker.backend` names one of them, which is then started for the run, or gives the address of one
that runs already. A bridge of this project stands between the trainer and such an engine.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lachesis.base import paths
from lachesis.base.errors import ConfigError, MissingDependencyError, shorten
from lachesis.base.json_text import Json

# Fields of the section `tinker` that only profile custom has a use for.
BACKEND_FIELDS = ("backend", "backend_config")
# Losses that no engine behind the bridge has.
MISSING_LOSSES = ("gspo", "dro")


@dataclass(frozen=True)
class Backend:
    """Describe an engine that can be started for a run."""

    name: str
    description: str
    packages: tuple[str, ...]
    """Packages of PyPI that its own environment holds."""
    min_python: tuple[int, int]
    ignored_fields: Mapping[str, object]
    """Fields of a run that it ignores, each with the value that is then allowed."""

    @property
    def folder(self) -> Path:
        """Return the folder of its environment, which `lachesis backend install` makes."""
        return paths.home() / "backends" / self.name

    @property
    def python(self) -> Path:
        """Return the Python interpreter of the back end."""
        return self.folder / "bin" / "python"

    def require_installed(self) -> None:
        """Raise MissingDependencyError unless its environment is on this machine."""
        if not self.python.exists():
            raise MissingDependencyError(
                f"the back end {self.name} is not installed on this machine (there is no "
                f"{self.python}); `lachesis backend install {self.name}` installs it, or set "
                "tinker.backend to the address of one that runs"
            )


BACKENDS = {
    "skyrl": Backend(
        "skyrl",
        "SkyRL's JAX engine: one machine or several, with cards or without",
        packages=("uv", "skyrl[tinker,jax,ray]==0.4.0"),
        min_python=(3, 12),
        ignored_fields={"tinker.grad_clip_norm": 0.0},
    )
}


def is_url(backend: str) -> bool:
    """Return whether a back end is an address."""
    return backend.startswith(("http://", "https://"))


def check_backend_name(backend: str) -> str:
    """Return the name or the address of a back end.

    Raises:
        ValueError: There is no such back end.
    """
    if not backend or backend in BACKENDS or is_url(backend):
        return backend.rstrip("/")
    raise ValueError(
        f"there is no back end {shorten(repr(backend), 60)}; allowed: {', '.join(BACKENDS)}, or "
        "the address (http://HOST:PORT) of an engine that runs, such as one of TuFT or miles"
    )


def check_backend(backend: str) -> None:
    """Raise MissingDependencyError when a back end that would be started is not installed here."""
    if backend in BACKENDS:
        BACKENDS[backend].require_installed()


def find_ignored_fields(backend: str, values: Mapping[str, Any]) -> list[str]:
    """Return for each field that the back end would ignore why it cannot have its value.

    Args:
        backend: The name or the address of the back end.
        values: The values of fields by their full name.
    """
    problems = []
    if backend in BACKENDS:
        for field, allowed in BACKENDS[backend].ignored_fields.items():
            if values.get(field, allowed) != allowed:
                problems.append(
                    f"{field} is {values[field]}, which {backend} ignores; allowed: {allowed}"
                )
    if backend and values.get("tinker.loss_fn") in MISSING_LOSSES:
        problems.append(
            f"tinker.loss_fn is {values['tinker.loss_fn']}, which no engine behind the bridge "
            "has; allowed: importance_sampling, ppo, cispo"
        )
    return problems


def get_check_file(url: str) -> Path:
    """Return the file in which `lachesis backend check` keeps its results about a server."""
    return paths.home() / "backends" / "checks" / f"{paths.to_safe_name(url)}.json"


def read_check(url: str) -> Json | None:
    """Return the results of the newest check of a server; None if it was never checked."""
    try:
        content = json.loads(get_check_file(url).read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def find_check_problem(url: str, grad_clip_norm: float) -> str | None:
    """Return why a run should not train on a server that was checked, or None."""
    check = read_check(url)
    if check is None:
        return None
    verdict = str(check.get("verdict"))
    if verdict.startswith("does not fit"):
        return (
            f"the server at {url} was checked at {check.get('checked_at')}, and {verdict}; "
            f"`lachesis backend check {url}` checks it again, and over the bridge "
            f"(tinker.backend={url}) it may fit"
        )
    if grad_clip_norm and "clipping" in verdict:
        return (
            f"tinker.grad_clip_norm is {grad_clip_norm:g}, which the server at {url} ignores as "
            "its check has found; allowed: 0"
        )
    return None


def find_uv(backend: Backend) -> str:
    """Return the `uv` of a back end's environment, which starts its processes.

    Raises:
        ConfigError: There is none.
    """
    uv = shutil.which("uv", path=str(backend.folder / "bin"))
    if uv is None:
        raise ConfigError(
            f"the environment of {backend.name} in {backend.folder} has no uv; install it again "
            f"with `lachesis backend install {backend.name}`"
        )
    return uv
