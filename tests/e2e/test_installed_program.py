"""The program from the built wheel alone, in an empty folder, as `uvx` and `pipx` install it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.served import processes_under

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def installed_command(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command `lachesis` of a new virtual environment that holds the wheel.

    Its dependencies are those of the tests, by a line of a .pth file: the .pth files beside them,
    and with them the editable installation, are not read.
    """
    folder = tmp_path_factory.mktemp("installed")
    build = ["-m", "pip", "wheel", "--no-deps", "--quiet", "--no-build-isolation", "-w", folder]
    subprocess.run([sys.executable, *build, ROOT], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    environment = folder / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    pip = ["-m", "pip", "--python", environment / "bin" / "python", "install", "--quiet"]
    subprocess.run([sys.executable, *pip, "--no-deps", wheel], check=True, capture_output=True)
    (site_packages,) = environment.glob("lib/python*/site-packages")
    (site_packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return environment / "bin" / "lachesis"


def test_the_demo_runs_from_the_wheel_in_an_empty_folder(
    installed_command: Path, new_home: Callable[[], Path], tmp_path: Path
) -> None:
    home = new_home()
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env |= {"LACHESIS_HOME": str(home)}
    package = installed_command.parents[1]
    files_before = _list_files(package)

    def run(*words: str) -> Any:
        done = subprocess.run(
            [installed_command, *words, "--json"],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    checks = {check["name"]: check for check in run("doctor")["checks"]}
    assert checks["flows"]["ok"]
    assert str(package) in checks["flows"]["found"]
    results = run("demo", "--steps", "3")
    (shown,) = run("runs")["runs"]
    assert (shown["run_id"], shown["status"]) == (results["run_id"], "completed")
    assert list(tmp_path.iterdir()) == []
    assert _list_files(package) == files_before, "the installed package is not written to"
    assert processes_under(home) == {}


def _list_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if "__pycache__" not in file.parts)
