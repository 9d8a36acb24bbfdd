"""Run `backend check|install`: probe how a Tinker server behaves, or install an engine."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Group, RenderableType
from rich.text import Text

from lachesis.base.api_keys import read_key
from lachesis.base.errors import ConfigError, MissingDependencyError
from lachesis.base.files import make_private_folder, storage_errors, write_private
from lachesis.base.json_text import Json
from lachesis.base.timestamps import now_iso
from lachesis.base.tinker_client import get_base_url, request_tinker
from lachesis.cli import terminal
from lachesis.cli.options import Output
from lachesis.cli.terminal import make_pairs_table, print_answer
from lachesis.config.backends import BACKENDS, Backend, get_check_file
from lachesis.config.profiles import adopt_profile_keys

COLORS = {"as Tinker": "green", "differs": "red", "fails": "red", "not determined": "yellow"}


def check_backend(
    url: Annotated[
        str | None, Parameter("URL", help="its address (default: that of TINKER_BASE_URL)")
    ] = None,
    /,
    *,
    model: Annotated[
        str | None, Parameter(help="a model that it trains (default: the first one that it offers)")
    ] = None,
    options: Output = Output(),
) -> int:
    """Ask a server the questions of all probes; return 1 if the trainer cannot use it."""
    if url:
        os.environ["TINKER_BASE_URL"] = url
    adopt_profile_keys("tinker")
    model = _choose_model(model)
    probe_results = {"checked_at": now_iso(), **_run_probes(options, model)}
    answer = {"url": get_base_url(), "model": model, **probe_results}
    file = get_check_file(get_base_url())
    with storage_errors(file):
        make_private_folder(file.parent)
        write_private(file, json.dumps(answer, indent=2))
    print_answer(options, answer, _render(answer))
    return int(answer["verdict"].startswith("does not fit"))


def _choose_model(name: str | None) -> str:
    """Return the model to probe with: the named model, or the first that can be trained.

    Raises:
        ConfigError: The server does not offer it.
    """
    content = request_tinker("GET", "get_server_capabilities", read_key("TINKER_API_KEY"))
    entries = content.get("supported_models") or []
    names = [str(entry["model_name"]) for entry in entries if entry.get("trainable") is not False]
    if not names or (name and name not in names):
        raise ConfigError(
            f"the server at {get_base_url()} does not offer {name or 'any model'} for training; "
            f"it offers {', '.join(names[:8]) or 'none'}"
        )
    return name or names[0]


def _run_probes(options: Output, model: str) -> Json:
    """Ask the server the questions of all probes; return the verdict and a row for each probe."""
    # The SDK takes seconds to load.
    from lachesis.tinker_conformance.session import open_backend_session
    from lachesis.tinker_conformance.weight_probes import PROBES, describe_verdict

    findings = {}
    with open_backend_session(model) as session:
        for probe in PROBES:
            if not options.json:
                terminal.print_note(f"{probe.name}: {probe.question}")
            findings[probe.name] = probe.run(session)
    rows = [
        {
            "probe": probe.name,
            "question": probe.question,
            "needed": probe.is_needed,
            "outcome": findings[probe.name].outcome,
            "finding": findings[probe.name].text,
        }
        for probe in PROBES
    ]
    return {"verdict": describe_verdict(findings), "probes": rows}


def _render(answer: Json) -> RenderableType:
    """Return server, model, the outcome of each probe and the verdict as a table."""
    rows: list[tuple[str | Text, str | Text]] = [
        ("server", answer["url"]),
        ("model", answer["model"]),
    ]
    for row in answer["probes"]:
        mark = Text(row["outcome"], style=COLORS[row["outcome"]])
        rows.append((row["probe"], Text.assemble(mark, f": {row['finding']}")))
    rows.append(("verdict", answer["verdict"]))
    return Group(make_pairs_table(rows))


NEWEST_PYTHON = 14


def install_backend(
    name: Annotated[str, Parameter("NAME", help="skyrl")],
    /,
    *,
    python: Annotated[
        str | None, Parameter(help="the interpreter (default: one that is found)")
    ] = None,
    options: Output = Output(),
) -> None:
    """Install the packages of a back end into an environment of its own."""
    if name not in BACKENDS:
        raise ConfigError(
            f"there is no back end {name} to install; allowed: "
            f"{', '.join(BACKENDS)}. TuFT and miles are started by hand and connected to by their "
            "address"
        )
    backend = BACKENDS[name]
    python = _find_python(backend, python)
    if not options.json:
        packages = ", ".join(backend.packages)
        terminal.print_note(f"installing {packages} into {backend.folder} (several GB, minutes)")
    _install(backend, python)
    answer = {
        "backend": backend.name,
        "folder": str(backend.folder),
        "next": f"lachesis train ENVIRONMENT --profile custom --set backend={backend.name}",
    }
    print_answer(options, answer, make_pairs_table([(name, text) for name, text in answer.items()]))


def _find_python(backend: Backend, wanted: str | None) -> str:
    """Return an interpreter that is new enough: the named, the running or another interpreter."""
    major, minor = backend.min_python
    names = [f"python{major}.{number}" for number in range(minor, NEWEST_PYTHON + 1)]
    others = [*filter(None, map(shutil.which, names)), *_list_pyenv_pythons()]
    candidates = [wanted] if wanted else [sys.executable, *others]
    for candidate in candidates:
        if _read_version(candidate) >= backend.min_python:
            return candidate
    raise MissingDependencyError(
        f"{backend.name} needs Python {major}.{minor} or newer, and "
        f"{wanted or f'this one is {sys.version_info[0]}.{sys.version_info[1]}'}; name another "
        "one with --python"
    )


def _list_pyenv_pythons() -> list[str]:
    """Return the interpreters that pyenv has installed, whose commands may be switched off."""
    root = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    return [str(python) for python in sorted(root.glob("versions/3.*/bin/python"))]


def _read_version(python: str) -> tuple[int, ...]:
    """Return major and minor version of an interpreter; zeros if it cannot be run."""
    code = "import sys; print(*sys.version_info[:2])"
    try:
        result = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return (0, 0)
    return tuple(map(int, result.stdout.split()))


def _install(backend: Backend, python: str) -> None:
    """Make the environment, or complete it.

    Raises:
        MissingDependencyError: A package cannot be installed.
    """
    own_uv = backend.folder / "bin" / "uv"
    commands = [
        [python, "-m", "venv", str(backend.folder)],
        [str(backend.python), "-m", "pip", "install", "--quiet", "uv"],
        [str(own_uv), "pip", "install", "--python", str(backend.python), *backend.packages],
    ]
    backend.folder.parent.mkdir(parents=True, exist_ok=True)
    for command in commands:
        # What the programs print goes to stderr, where it is no part of an answer.
        result = subprocess.run(command, stdout=sys.stderr.fileno(), check=False)
        if result.returncode != 0:
            raise MissingDependencyError(
                f"`{' '.join(map(_shorten_path, command))}` failed with exit code "
                f"{result.returncode}; its reason is above, and the same command goes on from there"
            )


def _shorten_path(part: str) -> str:
    return Path(part).name if part.startswith("/") else part
