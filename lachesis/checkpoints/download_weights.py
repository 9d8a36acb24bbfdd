"""Download the adapter of a checkpoint from a Tinker server, and go on where a download broke off.

The server first writes a copy of the checkpoint for downloading, under an address that is valid for
an hour. The address of that copy and what was received of its files are kept in the run's folder
until the download is complete, so that a second try, also by another command, begins where the
first one ended.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from lachesis.base.errors import CheckpointError
from lachesis.base.files import storage_errors, write_private
from lachesis.base.formatting import format_bytes
from lachesis.base.http_client import get_tls_context
from lachesis.base.json_text import Json
from lachesis.base.tinker_client import (
    open_rest_client,
    open_service_client,
    require_operation,
    wait_for_sdk,
)

if TYPE_CHECKING:
    import tinker

COPY_NAME, COPY_TTL_S = "lachesis-download", 3600
# How often a file is asked for again after its download broke off, and how long in between.
MAX_TRIES = 8
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 20.0
CHUNK_BYTES = 1 << 20
TIMEOUT = httpx.Timeout(60.0, connect=20.0)


def download_checkpoint(state: str, cache: Path, target: Path) -> int:
    """Download the files of a training checkpoint, and return how often a file broke off.

    Args:
        state: The `tinker://` path of the checkpoint.
        cache: A folder for what was received until now; removed when the download is complete.
        target: The folder that gets the files.

    Raises:
        CheckpointError: The server refused, or a file broke off too often.
    """
    import tinker

    with storage_errors(cache):
        cache.mkdir(parents=True, exist_ok=True)
    try:
        with open_rest_client() as rest_client:
            return _download_all(state, rest_client, cache, target)
    except (tinker.TinkerError, ValueError, httpx.HTTPError) as error:
        raise CheckpointError(f"{state} could not be downloaded: {error}") from error


def _download_all(state: str, rest_client: tinker.RestClient, cache: Path, target: Path) -> int:
    """Download a checkpoint's files through a cache, and return the number of retries."""
    import tinker

    require_operation(rest_client, "get_external_weights_urls", "download weights")
    copy = _find_copy(cache, rest_client) or _make_copy(state, cache)
    urls = rest_client.get_external_weights_urls(copy).result().urls
    _refuse_outside_names(urls)
    num_breaks = sum(_download_file(url, cache / name) for name, url in urls.items())
    with storage_errors(target):
        for name in urls:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(cache / name, target / name)
    # The copy expires by itself, if it cannot be deleted.
    with contextlib.suppress(tinker.TinkerError, ValueError):
        rest_client.delete_checkpoint_from_tinker_path(copy).result()
    shutil.rmtree(cache, ignore_errors=True)
    return num_breaks


def _refuse_outside_names(names: Iterable[str]) -> None:
    """Raise CheckpointError for a file that the server would have written elsewhere."""
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"the server names a file outside of the download: {name!r}")


def _find_copy(cache: Path, rest_client: tinker.RestClient) -> str | None:
    """Return the path of a copy that an earlier try has made, if the server still has it."""
    try:
        copy: Json = json.loads((cache / "copy.json").read_text())
        if time.time() - copy["made_at"] < COPY_TTL_S / 2:
            rest_client.get_external_weights_urls(copy["path"]).result()
            return str(copy["path"])
    except Exception:  # Whatever it is, a new copy is made.
        return None
    return None


def _make_copy(state: str, cache: Path) -> str:
    """Let the server write a copy of the checkpoint for downloading, and return its path."""
    # Parts of another copy may have other bytes.
    for part in cache.iterdir():
        part.unlink()
    with open_service_client(user_metadata={"created_by": "lachesis export"}) as service_client:
        training_client = wait_for_sdk(service_client.create_training_client_from_state(state))
        saved = training_client.save_weights_external(COPY_NAME, ttl_seconds=COPY_TTL_S).result()
    write_private(cache / "copy.json", json.dumps({"path": saved.path, "made_at": time.time()}))
    return str(saved.path)


def _download_file(url: str, file: Path, sleep: Callable[[float], None] = time.sleep) -> int:
    """Download one file, and return how often it broke off.

    Raises:
        CheckpointError: It broke off too often, or the server refused it.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    pause_s = FIRST_PAUSE_S
    for num_breaks in range(MAX_TRIES):
        try:
            _continue_download(url, file)
        except httpx.HTTPError as error:
            if isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500:
                raise CheckpointError(
                    f"{file.name} could not be downloaded: HTTP {error.response.status_code}"
                ) from error
            last_error = error
        else:
            return num_breaks
        sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)
    received = file.stat().st_size if file.exists() else 0
    raise CheckpointError(
        f"{file.name} broke off {MAX_TRIES} times, the last time after {format_bytes(received)}: "
        f"{last_error}; the same command goes on from there"
    )


def _continue_download(url: str, file: Path) -> None:
    """Download the missing rest of a file."""
    size = file.stat().st_size if file.exists() else 0
    headers = {"range": f"bytes={size}-"} if size else {}
    with httpx.stream(
        "GET", url, headers=headers, timeout=TIMEOUT, verify=get_tls_context()
    ) as response:
        # Nothing is missing: the range begins at the end.
        if response.status_code == 416 and size:
            return
        response.raise_for_status()
        mode = "ab" if response.status_code == 206 else "wb"
        with storage_errors(file), file.open(mode) as stream:
            for chunk in response.iter_raw(CHUNK_BYTES):
                stream.write(chunk)
