"""Run trainer and engine against versions of the Tinker SDK: `make sdk-matrix`.

The oldest version that is supported, the pinned one, and the newest that the package index has.
Each is installed into a folder of its own, without its dependencies, which this environment has.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OLDEST, NEWEST = "0.27.0", "newest"
# Tests that call the SDK, most of them against a real engine.
TESTS = (
    "tests/engine/test_contract.py",
    "tests/engine/test_model_thread.py",
    "tests/engine/test_questions.py",
    "tests/engine/test_sampling.py",
    "tests/engine/test_several_models.py",
    "tests/engine/test_training_contract.py",
    "tests/inference_server",
    "tests/trainer/test_accounts.py",
    "tests/trainer/test_checkpoint_saving.py",
    "tests/trainer/test_evaluation_schedule.py",
    "tests/trainer/test_loop.py",
    "tests/trainer/test_trained_model.py",
    "tests/trainer/test_recompute_logprobs.py",
    "tests/trainer/test_tinker_outages.py",
    "tests/weight_agreement/test_at_weight_sync.py",
)


def main() -> int:
    """Run the tests with each version, print a table, and return 1 if any failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients.sdk_matrix", description=__doc__)
    parser.add_argument("versions", nargs="*", default=[OLDEST, _read_pinned(), NEWEST])
    parser.add_argument("--folder", type=Path, default=ROOT / ".home" / "sdk")
    args = parser.parse_args()
    results = {}
    for version in args.versions:
        folder = args.folder.resolve() / version
        installed = _install(version, folder)
        if installed not in results:
            results[installed] = _run_tests(folder)
    print("\nTinker SDK")
    for version, result in results.items():
        print(f"  {version:8}  {result}")
    return int(any("failed" in result or "error" in result for result in results.values()))


def _read_pinned() -> str:
    constraints = (ROOT / "constraints.txt").read_text()
    match = re.search(r"^tinker==(\S+)$", constraints, re.MULTILINE)
    assert match, "constraints.txt pins no tinker"
    return match[1]


def _install(version: str, folder: Path) -> str:
    """Install a version of the SDK into a folder, and return its number."""
    requirement = "tinker" if version == NEWEST else f"tinker=={version}"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
    subprocess.run([*command, "--target", str(folder), requirement], check=True)
    return next(folder.glob("tinker-*.dist-info")).name.split("-")[1].removesuffix(".dist")


def _run_tests(folder: Path) -> str:
    """Run the tests with the SDK of a folder, and return the last line of their report."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadscope", *TESTS]
    env = {**os.environ, "PYTHONPATH": str(folder)}
    lines = []
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return lines[-1].strip(" =\n") if lines else "error: no tests ran"


if __name__ == "__main__":
    sys.exit(main())
