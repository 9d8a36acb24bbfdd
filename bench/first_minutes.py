"""Measure the first minutes of a new user: from nothing to the first curve.

python bench/first_minutes.py [--clone] [--wheel]

`--clone` clones this repository into a new folder and runs `make demo` there, which installs
everything first. `--wheel` builds the wheel, installs it into a new virtual environment beside the
packages of this interpreter (as an installer has them in its cache), and runs `lachesis demo`.
Without an option both are measured. The first curve is there when ten steps have been made: then
`--watch` and the page of the run show one. Targets: 150 s from a clone, 60 s from the wheel.
"""

import argparse
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Sequence
from pathlib import Path

from table import show

from lachesis.runs.metrics import MetricsFile

ROOT = Path(__file__).resolve().parents[1]
STEPS_OF_CURVE = 10
MAX_WAIT_S = 900.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clone", action="store_true")
    parser.add_argument("--wheel", action="store_true")
    args = parser.parse_args()
    rows: list[list[object]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.clone or not args.wheel:
            rows.append(["clone, `make demo`", *measure_clone(folder / "clone"), "150"])
        if args.wheel or not args.clone:
            rows.append(["wheel, `lachesis demo`", *measure_wheel(folder / "wheel"), "60"])
    columns = ["from nothing (seconds)", "installed", "first step", "first curve", "target"]
    show("the first minutes", columns, rows)


def measure_clone(folder: Path) -> list[str]:
    """Return the seconds until everything is installed, the first step, and the first curve."""
    started = time.monotonic()
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    subprocess.run(["make", "install"], cwd=folder, check=True, capture_output=True)
    installed_s = time.monotonic() - started
    return [f"{installed_s:.0f}", *time_demo(["make", "demo"], folder, folder / "home", started)]


def measure_wheel(folder: Path) -> list[str]:
    """Return the same for the wheel."""
    folder.mkdir()
    build = ["-m", "pip", "wheel", "--no-deps", "--quiet", "--no-build-isolation", "-w", folder]
    subprocess.run([sys.executable, *build, ROOT], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    started = time.monotonic()
    environment = folder / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    pip = ["-m", "pip", "--python", environment / "bin" / "python", "install", "--quiet"]
    subprocess.run([sys.executable, *pip, "--no-deps", wheel], check=True)
    (site_packages,) = environment.glob("lib/python*/site-packages")
    (site_packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    installed_s = time.monotonic() - started
    command = [str(environment / "bin" / "lachesis"), "demo"]
    empty_folder = folder / "empty"
    empty_folder.mkdir()
    return [f"{installed_s:.0f}", *time_demo(command, empty_folder, folder / "home", started)]


def time_demo(command: Sequence[str], folder: Path, home: Path, started: float) -> list[str]:
    """Run the demo until there is a curve, end it, and return the seconds of both moments."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("LACHESIS_")}
    env |= {"LACHESIS_HOME": str(home)}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    moments = []
    for num_steps in (1, STEPS_OF_CURVE):
        while count_steps(home) < num_steps:
            if process.poll() is not None or time.monotonic() - started > MAX_WAIT_S:
                raise SystemExit(f"{command}: no curve")
            time.sleep(0.1)
        moments.append(f"{time.monotonic() - started:.0f}")
    os.killpg(process.pid, signal.SIGINT)
    process.wait(120)
    return moments


def count_steps(home: Path) -> int:
    """Return how many steps the run of the home has made."""
    return max(
        (len(MetricsFile(file).read()) for file in home.glob("runs/*/metrics.jsonl")), default=0
    )


if __name__ == "__main__":
    main()
