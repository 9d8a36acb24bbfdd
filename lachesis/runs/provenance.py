"""Record what a run is made of when it is created: code, data, packages, machine and command.

`provenance.json` of the run holds it, and `sources/` a copy of the environments' code. Both say
later what a result came from, when the environment's file has changed and packages were updated.
"""

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from lachesis import __version__
from lachesis.base import paths
from lachesis.base.files import (
    make_private_folder,
    open_owner_only,
    read_cached,
    storage_errors,
    write_private,
)
from lachesis.base.json_text import Json
from lachesis.base.secrets import redact
from lachesis.config.run_config import RunConfig
from lachesis.environment_catalog.fingerprint import find_import_root, list_source_files
from lachesis.models.find_model import find_cached_snapshot
from lachesis.runs.folder import RunDir

# The packages that decide how a run trains; `packages` has all of them.
MAIN_PACKAGES = ("torch", "transformers", "peft", "tinker", "atroposlib", "prefect", "numpy")
GIT_TIMEOUT_S = 5.0
# Files that are larger are identified by their beginning, their end and their size.
HASHED_BYTES = 1_000_000
MAX_SOURCE_BYTES = 10_000_000


def write_provenance(
    run_dir: RunDir, environment_files: Mapping[str, str], config: RunConfig
) -> None:
    """Write the provenance of a run into its folder: code, data, packages, machine, command.

    Args:
        run_dir: The folder of the run.
        environment_files: The file of each environment, by its name.
        config: The configuration; values of it that name files are data.

    Raises:
        StorageError: The folder cannot be written.
    """
    provenance: Json = {
        "command": _describe_command(),
        "lachesis": {"version": __version__, **_describe_commit(paths.PACKAGE)},
        "environments": {
            name: _copy_sources(Path(file), run_dir.sources / name)
            for name, file in environment_files.items()
        },
        "model": _describe_model(config.openai.model_name),
        "data": {
            str(file): _compute_file_hash(file) for file in _find_data_files(config.model_dump())
        },
        "machine": _describe_machine(),
        "packages": _list_packages(),
    }
    write_private(run_dir.provenance, json.dumps(provenance, indent=2))


def read_provenance(run_dir: RunDir) -> Json | None:
    """Return the provenance of a run with the main packages; None if it cannot be read."""
    try:
        provenance: Json = json.loads(run_dir.provenance.read_text(encoding="utf-8"))
        packages = provenance.get("packages", {})
        main = {name: packages[name] for name in MAIN_PACKAGES if name in packages}
        return {**provenance, "packages": main}
    except (OSError, ValueError, AttributeError, TypeError):  # The file may be damaged.
        return None


def _describe_command() -> str | None:
    """Return the command line, or None where the run was started by another program."""
    if Path(sys.argv[0]).stem not in ("lachesis", "main"):
        return None
    return redact(shlex.join(["lachesis", *sys.argv[1:]]))


def _describe_commit(folder: Path) -> Json:
    """Return the git commit of a folder and whether its files differ from it, if git knows them."""
    commit = _run_git(folder, "rev-parse", "HEAD")
    if not commit or not _run_git(folder, "ls-files", "."):
        return {}
    return {"commit": commit, "changed": bool(_run_git(folder, "status", "--porcelain", "."))}


def _run_git(folder: Path, *words: str) -> str:
    """Return the output of a git command; an empty string if it fails or git is not installed."""
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            env=env,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _copy_sources(file: Path, target: Path) -> Json:
    """Copy an environment's file and the modules that it imports; return where they came from."""
    root = find_import_root(file)
    sources = sorted(source for source in list_source_files(file.resolve()) if source.is_file())
    num_bytes, hashes = 0, {}
    with storage_errors(target):
        for source in sources:
            name = os.path.relpath(source, root) if source.is_relative_to(root) else source.name
            content = read_cached(source)
            hashes[name] = hashlib.sha256(content).hexdigest()
            num_bytes += len(content)
            if num_bytes <= MAX_SOURCE_BYTES:
                make_private_folder((target / name).parent)
                with open(target / name, "wb", opener=open_owner_only) as copy:
                    copy.write(content)
    return {"file": str(file), "sha256": hashes, **_describe_commit(file.parent)}


def _describe_model(model: str) -> Json:
    """Return the revision of a model from the Hub, or the hashes of the files in a folder."""
    folder = Path(model)
    if not folder.is_absolute():
        snapshot = find_cached_snapshot(model)
        return {"name": model, "revision": snapshot.name if snapshot else None}
    files = sorted(file for file in folder.glob("*") if file.is_file())
    return {"folder": model, "sha256": {file.name: _compute_file_hash(file) for file in files}}


def _find_data_files(values: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the files that the values of the configuration name by absolute paths."""
    for value in values.values():
        if isinstance(value, Mapping):
            yield from _find_data_files(value)
        elif isinstance(value, str) and os.path.isabs(value) and Path(value).is_file():
            yield Path(value)


def _compute_file_hash(file: Path) -> str:
    """Return the SHA-256 of a file, or of the size, beginning and end of a large file."""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(0)
            if size <= 2 * HASHED_BYTES:
                return hashlib.sha256(stream.read()).hexdigest()
            digest = hashlib.sha256(f"{size} ".encode() + stream.read(HASHED_BYTES))
            stream.seek(size - HASHED_BYTES)
            digest.update(stream.read())
            return f"{digest.hexdigest()} (of its size, first and last megabyte)"
    except OSError as error:
        return f"not readable: {error.strerror}"


def _describe_machine() -> Json:
    """Return host, system, Python, processor, memory and cards of this machine."""
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "cpu_cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "gpus": list_gpus(),
    }


def list_gpus() -> list[str]:
    """Return the names of the NVIDIA GPUs, as their driver lists them."""
    files = Path("/proc/driver/nvidia/gpus").glob("*/information")
    lines = [line for file in sorted(files) for line in file.read_text().splitlines()]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]


def _list_packages() -> dict[str, str]:
    """Return the versions of all installed packages by their names."""
    # Installing or removing a package changes the folder that it lies in.
    folders = tuple(
        (entry, os.stat(entry).st_mtime_ns) for entry in sys.path if os.path.isdir(entry)
    )
    return dict(_read_packages(folders))


@functools.lru_cache(maxsize=2)
def _read_packages(folders: tuple[tuple[str, int], ...]) -> dict[str, str]:
    distributions = importlib.metadata.distributions(path=[entry for entry, _ in folders])
    versions = {item.metadata["Name"]: item.version for item in distributions}
    return dict(sorted((name, version) for name, version in versions.items() if name))
