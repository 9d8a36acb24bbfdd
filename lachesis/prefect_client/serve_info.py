"""Read where the Prefect server of a home listens, and its password."""

from __future__ import annotations

import json
import os
from pathlib import Path

from lachesis.base import paths
from lachesis.base.files import write_private
from lachesis.base.json_text import Json
from lachesis.base.timestamps import now_iso
from lachesis.config.profiles import list_all_keys


def read_server_info(home: Path | None = None) -> Json | None:
    """Return what the launcher of this home has written, or None.

    The keys are `api_url`, `ui_url`, `keys`, `key_places`, `max_runs` and `pids`.
    """
    try:
        server_info: Json = json.loads(server_file(home).read_text())
        is_valid = (
            isinstance(server_info["api_url"], str)
            and isinstance(server_info["keys"], list)
            and isinstance(server_info["max_runs"], int)
        )
        if is_valid and all(isinstance(key, str) for key in server_info["keys"]):
            return server_info
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def write_server_info(home: Path, content: Json) -> None:
    """Write where this process, the launcher of a home, has its server."""
    content = {
        **content,
        "keys": [name for name in list_all_keys() if os.environ.get(name)],
        "ui_url": content["api_url"].removesuffix("/api"),
        "pid": os.getpid(),
        "started_at": now_iso(),
    }
    write_private(server_file(home), json.dumps(content))


def remove_server_info(home: Path) -> None:
    """Remove what this process has written about its server."""
    server_info = read_server_info(home)
    if server_info is not None and server_info.get("pid") == os.getpid():
        server_file(home).unlink(missing_ok=True)


def server_file(home: Path | None = None) -> Path:
    """Return the file in which the launcher describes its Prefect server."""
    return (home or paths.home()) / "server.json"


def find_api_url(home: Path | None = None) -> str | None:
    """Return `$PREFECT_API_URL`, else the URL of this home's running launcher, else None."""
    configured_url = os.environ.get("PREFECT_API_URL")
    if configured_url:
        return configured_url.rstrip("/")
    server_info = read_server_info(home)
    if server_info is None:
        return None
    return str(server_info["api_url"])


def read_auth_string() -> str | None:
    """Return NAME:PASSWORD of the server, or None if it requires none.

    It comes from $PREFECT_API_AUTH_STRING or the setting of the server itself.
    """
    return (
        os.environ.get("PREFECT_API_AUTH_STRING")
        or os.environ.get("PREFECT_SERVER_API_AUTH_STRING")
        or None
    )
