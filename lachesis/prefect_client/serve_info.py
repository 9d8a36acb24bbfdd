"""Read where the Prefect server of a home listens, and prove that it is the server of this home.

`lachesis serve` writes the file `server.json`, which outlives a `serve` that was killed: its
process ids and its port may then belong to others. So what it says counts only while the `serve` or
the server that it names is alive, and each answer of that server carries a proof of its home.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from lachesis.base import paths
from lachesis.base.files import write_private
from lachesis.base.json_text import Json
from lachesis.base.managed_process import ProcessIdentity
from lachesis.base.timestamps import now_iso
from lachesis.config.profiles import list_all_keys

# The header of an answer that proves which home its server belongs to.
HOME_HEADER = "lachesis-home"
# The names of the processes in `server.json`.
LAUNCHER, SERVER, RUNNER = "launcher", "server", "runner"


def read_server_info(home: Path | None = None) -> Json | None:
    """Return the information file of this home's `serve`; None if neither it nor its server lives.

    The keys are `home`, `api_url`, `ui_url`, `keys`, `key_places`, `max_runs`, `started_at` and
    `processes`, the identities of `serve` and of what it has started.
    """
    info = _read_file(home)
    if info is not None and any(
        identity.is_alive()
        for name, identity in read_processes(info).items()
        if name in (LAUNCHER, SERVER)
    ):
        return info
    return None


def _read_file(home: Path | None) -> Json | None:
    """Return the information file if it is whole and of this home, else None."""
    try:
        info: Json = json.loads(server_file(home).read_text())
        is_valid = (
            # A copied home is not served by what serves the one that it was copied from.
            info["home"] == str(home or paths.home())
            and isinstance(info["api_url"], str)
            and isinstance(info["keys"], list)
            and isinstance(info["max_runs"], int)
            and isinstance(info["processes"], dict)
        )
        if is_valid and all(isinstance(key, str) for key in info["keys"]):
            return info
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def is_serve_alive(home: Path | None = None) -> bool:
    """Return whether the `serve` of this home is running, which restarts a server that has died."""
    info = _read_file(home)
    launcher = None if info is None else read_processes(info).get(LAUNCHER)
    return launcher is not None and launcher.is_alive()


def read_processes(info: Json) -> dict[str, ProcessIdentity]:
    """Return the identities of the processes that `server.json` names, by their names."""
    identities = {
        name: ProcessIdentity.from_json(content) for name, content in info["processes"].items()
    }
    return {name: identity for name, identity in identities.items() if identity is not None}


def write_server_info(
    home: Path,
    api_url: str,
    child_pids: Mapping[str, int],
    *,
    max_runs: int,
    key_places: Mapping[str, str],
) -> None:
    """Write where this process, the `serve` of a home, has its server."""
    pids = {LAUNCHER: os.getpid(), **child_pids}
    identities = {name: ProcessIdentity.read(pid) for name, pid in pids.items()}
    info = {
        "home": str(home),
        "api_url": api_url,
        "ui_url": api_url.removesuffix("/api"),
        "keys": [name for name in list_all_keys() if os.environ.get(name)],
        "key_places": dict(key_places),
        "max_runs": max_runs,
        "started_at": now_iso(),
        "processes": {name: asdict(found) for name, found in identities.items() if found},
    }
    write_private(server_file(home), json.dumps(info))


def remove_server_info(home: Path) -> None:
    """Remove what this process has written about its server."""
    info = _read_file(home)
    if info is not None:
        launcher = read_processes(info).get(LAUNCHER)
        if launcher is not None and launcher.pid == os.getpid():
            server_file(home).unlink(missing_ok=True)


def server_file(home: Path | None = None) -> Path:
    """Return the file in which `serve` describes its Prefect server."""
    return (home or paths.home()) / "server.json"


def find_api_url(home: Path | None = None) -> str | None:
    """Return `$PREFECT_API_URL`, else the URL of this home's running server, else None."""
    configured_url = os.environ.get("PREFECT_API_URL")
    if configured_url:
        return configured_url.rstrip("/")
    info = read_server_info(home)
    return None if info is None else str(info["api_url"])


def make_home_proof(mark: str) -> str:
    """Return the value of `HOME_HEADER` by which a server proves that it belongs to a home.

    Args:
        mark: The mark of the home's processes, which nobody else can read.
    """
    return hashlib.sha256(f"server of {mark}".encode()).hexdigest()


def find_expected_proof(api_url: str, home: Path | None = None) -> str | None:
    """Return the proof that a server at this address must send; None for a server that is not ours.

    Another home's server may listen at the address of this home's server after that has died.
    """
    info = _read_file(home)
    if info is None or info["api_url"] != api_url or SERVER not in info["processes"]:
        return None
    # Loaded here, because most answers need no proof.
    from lachesis.supervision.process_marks import build_mark

    return make_home_proof(build_mark(home or paths.home()))


def read_auth_string() -> str | None:
    """Return NAME:PASSWORD of the server, or None if it requires none.

    It comes from $PREFECT_API_AUTH_STRING or the setting of the server itself.
    """
    return (
        os.environ.get("PREFECT_API_AUTH_STRING")
        or os.environ.get("PREFECT_SERVER_API_AUTH_STRING")
        or None
    )
