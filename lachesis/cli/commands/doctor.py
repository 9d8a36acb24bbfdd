"""Run `doctor`: list what a run needs, whether it is here, and how to install it."""

import contextlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import httpx
import psutil
from cyclopts import Parameter
from rich.console import RenderableType
from rich.text import Text

from lachesis.base import paths
from lachesis.base.api_keys import ENVIRONMENT, describe_places, find_key
from lachesis.base.errors import LachesisError, PortInUseError
from lachesis.base.json_text import Json
from lachesis.cli import terminal
from lachesis.cli.options import Output
from lachesis.cli.terminal import make_pairs_table
from lachesis.config.profiles import PROFILES, list_missing_modules
from lachesis.operations.environments import scan_environments
from lachesis.operations.server import (
    Leftover,
    check_port,
    find_all_leftovers,
    find_running_server,
    read_server_info,
)
from lachesis.runs.provenance import list_gpus
from lachesis.runs.store import RunStore
from lachesis.tiny_model import build

PREFECT_PORT = 4200
HUB_URL, HUB_TIMEOUT_S = "https://huggingface.co", 3.0
MIN_MEMORY_BYTES = 3 * 2**30
# Keys of services that a run can do without.
KEYS = {"key of OpenRouter": ("OPENROUTER_API_KEY",), "key of W&B": ("WANDB_API_KEY",)}
VERSIONED_PACKAGES = ("lachesis-rl", "torch", "transformers", "tinker", "atroposlib", "prefect")


@dataclass(frozen=True)
class DoctorCheck:
    """One finding. A check that is not `needed` only enables further features."""

    name: str
    ok: bool
    found: str
    remedy: str = ""
    needed: bool = True


def doctor(
    *,
    fix: Annotated[
        bool, Parameter(help="clean up after dead runs: processes, files, Tinker sessions")
    ] = False,
    options: Output = Output(),
) -> int:
    """Check this machine, and with `--fix` remove what crashed runs left behind."""
    if fix:
        messages = [leftover.clean_up() for leftover in find_home_leftovers()]
        terminal.print_answer(
            options, {"done": messages}, "\n".join(messages) or "dead runs have left nothing behind"
        )
        return 0
    checks = run_checks()
    terminal.print_answer(
        options, {"checks": [asdict(check) for check in checks]}, _render_checks(checks)
    )
    if all(check.ok or not check.needed for check in checks):
        return 0
    return 1


def _render_checks(checks: Sequence[DoctorCheck]) -> RenderableType:
    """Return the results of checks, each with its advice on a line of its own."""
    rows = []
    for check in checks:
        mark = Text("ok", style="green")
        if not check.ok:
            mark = Text("not ok", style="red") if check.needed else Text("optional")
        mark.append(" " * (10 - mark.cell_len))
        finding = check.found if check.ok else f"{check.found}\n→ {check.remedy}"
        rows.append((mark.append(check.name, style="bold"), finding))
    return make_pairs_table(rows)


def run_checks() -> list[DoctorCheck]:
    """Return the result of every check of this machine."""
    machine_checks = [
        _check_python(),
        *_list_machine(),
        _check_project(),
        _check_embedded_engine(),
        _check_mcp(),
        _check_tiny_model(),
        _check_server(),
        _check_port(),
        *_check_keys(),
        _check_hub(),
        _check_environments(),
        _check_disk(),
    ]
    return [
        *machine_checks,
        *(
            DoctorCheck("left behind", False, leftover.description, "lachesis doctor --fix")
            for leftover in find_home_leftovers()
        ),
    ]


def find_home_leftovers() -> list[Leftover]:
    """Return the leftovers of crashed runs; an empty list if there is no home yet."""
    if paths.home().is_dir():
        return find_all_leftovers(RunStore())
    return []


def _check_python() -> DoctorCheck:
    version = ".".join(map(str, sys.version_info[:3]))
    return DoctorCheck(
        "Python 3.11 or newer",
        sys.version_info >= (3, 11),
        version,
        "install Python 3.11, 3.12 or 3.13",
    )


def _list_machine() -> list[DoctorCheck]:
    """Return the hardware of this machine and the versions of the main packages."""
    memory = psutil.virtual_memory()
    gpus = ", ".join(list_gpus()) or "no NVIDIA GPU"
    versions = []
    for name in VERSIONED_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    return [
        DoctorCheck("processor", True, f"{os.cpu_count()} cores, {gpus}"),
        *_list_cards(),
        DoctorCheck(
            "memory",
            memory.available > MIN_MEMORY_BYTES,
            f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB available",
            "end other programs; a run of the tiny model needs 3 GiB",
            needed=False,
        ),
        DoctorCheck("versions", True, ", ".join(versions)),
    ]


def _list_cards() -> list[DoctorCheck]:
    """Return the memory of each card, as the driver's program tells it."""
    command = ["nvidia-smi", "--query-gpu=name,memory.free,memory.total"]
    try:
        result = subprocess.run(
            [*command, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [_describe_card(line) for line in result.stdout.splitlines() if line.count(",") == 2]


def _describe_card(line: str) -> DoctorCheck:
    """Return the check of a card from a line of `nvidia-smi`, whose numbers are MiB."""
    name, free_mib, total_mib = (part.strip() for part in line.split(","))
    text = f"{name}, {float(free_mib) / 1024:.1f} of {float(total_mib) / 1024:.1f} GiB free"
    return DoctorCheck("card", True, f"{text}; `lachesis model memory NAME` says what fits")


def _check_port() -> DoctorCheck:
    """Return whether Prefect's usual port is free, or used by the server of this home."""
    server = find_running_server()
    if server and f":{PREFECT_PORT}" in server["ui_url"]:
        return DoctorCheck(f"port {PREFECT_PORT}", True, "used by the Prefect server of this home")
    try:
        check_port(PREFECT_PORT)
    except PortInUseError:
        finding = "used by another program; `lachesis serve` takes a free port then"
        return DoctorCheck(f"port {PREFECT_PORT}", True, finding)
    return DoctorCheck(f"port {PREFECT_PORT}", True, "free")


def _check_hub() -> DoctorCheck:
    """Return whether the Hugging Face Hub answers; models in folders do not need it."""
    url = os.environ.get("HF_ENDPOINT", HUB_URL)
    name, remedy = "Hugging Face Hub", "check the network; models in folders do not need it"
    try:
        response = httpx.head(url, timeout=HUB_TIMEOUT_S, follow_redirects=True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        finding = f"{url} does not answer ({type(error).__name__})"
        return DoctorCheck(name, False, finding, remedy, needed=False)
    finding = f"{url} answers {response.status_code}"
    return DoctorCheck(name, response.status_code < 500, finding, remedy, needed=False)


def _check_project() -> DoctorCheck:
    try:
        return DoctorCheck("flows", True, str(paths.project_dir()))
    except LachesisError as error:
        return DoctorCheck(
            "flows", False, str(error), f"pip install --force-reinstall {paths.DISTRIBUTION}"
        )


def _check_embedded_engine() -> DoctorCheck:
    missing = list_missing_modules(("torch", "transformers", "peft", "safetensors"))
    state = f"without {', '.join(missing)}" if missing else "installed"
    return DoctorCheck(
        "embedded engine", not missing, state, "pip install 'lachesis-rl[embedded]'", needed=False
    )


def _check_mcp() -> DoctorCheck:
    missing = list_missing_modules(["mcp"])
    state = "not installed" if missing else "installed"
    return DoctorCheck(
        "MCP server", not missing, state, "pip install 'lachesis-rl[mcp]'", needed=False
    )


def _check_tiny_model() -> DoctorCheck:
    """Return whether the tiny model is built, and where."""
    path = build.get_tiny_model_path(build.TinyModelRecipe())
    is_built = path.is_dir()
    return DoctorCheck(
        "tiny model",
        is_built,
        str(path) if is_built else "not built",
        "lachesis model build",
        needed=False,
    )


def _check_server() -> DoctorCheck:
    """Return whether the Prefect server of this home runs, and its address."""
    server = find_running_server()
    return DoctorCheck(
        "Prefect server",
        server is not None,
        server["ui_url"] if server else "not running",
        "lachesis serve",
        needed=False,
    )


def _check_keys() -> list[DoctorCheck]:
    """Return where the keys of each profile and service are, and never their values."""
    server_info = read_server_info()
    key_users = {
        f"keys of profile {profile.name}": profile.required_keys
        for profile in PROFILES.values()
        if profile.required_keys
    }
    return [
        _check_service_keys(name, keys, server_info) for name, keys in (key_users | KEYS).items()
    ]


def _check_service_keys(
    name: str, key_names: Sequence[str], server_info: Json | None
) -> DoctorCheck:
    """Return where these keys are; runs have those of the launcher, if it runs."""
    if server_info is None:
        keys = [key for key_name in key_names if (key := find_key(key_name)) is not None]
        places = {key.name: key.place for key in keys}
        owner, remedy = "", ""
    else:
        places = server_info.get("key_places") or dict.fromkeys(server_info["keys"], ENVIRONMENT)
        owner, remedy = "`lachesis serve`: ", " and start `lachesis serve` again"
    missing = [key_name for key_name in key_names if key_name not in places]
    if missing:
        state = f"{owner}without {', '.join(missing)}"
    else:
        state = owner + ", ".join(f"{key_name} in {places[key_name]}" for key_name in key_names)
    return DoctorCheck(
        name,
        not missing,
        state,
        f"set {', '.join(missing)} in the environment, in {describe_places()}{remedy}",
        needed=False,
    )


def _check_environments() -> DoctorCheck:
    """Return how many environments were found, and which files cannot be read."""
    scan = scan_environments()
    state = f"{len(scan.environments)} found"
    if scan.problems:
        state += "; not readable: " + "; ".join(
            f"{file} ({reason})" for file, reason in scan.problems.items()
        )
    return DoctorCheck(
        "environments",
        bool(scan.environments) and not scan.problems,
        state,
        "see environments/README.md",
    )


def _check_disk() -> DoctorCheck:
    """Return whether the home can be written, and the free space in GiB."""
    home = paths.home()
    existing_folder = next(folder for folder in (home, *home.parents) if folder.exists())
    free_gib = shutil.disk_usage(existing_folder).free / 2**30
    is_writable = os.access(existing_folder, os.W_OK)
    state = f"{free_gib:.1f} GiB free at {home}{'' if is_writable else ', not writable'}"
    return DoctorCheck(
        "home folder",
        is_writable and free_gib > 1,
        state,
        "free some space, or set LACHESIS_HOME to another folder",
    )
