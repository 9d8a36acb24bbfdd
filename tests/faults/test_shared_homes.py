"""A home is copied to another host, or several programs change one run at once."""

import os
import secrets
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults.struck_home import StruckHome
from tests.faults.test_disks import needs_root
from tests.harness.processes import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200), pytest.mark.matrix]
# What another machine has for itself.
IDENTITIES = ("/etc/machine-id", "/proc/sys/kernel/random/boot_id")


def run_elsewhere(tmp_path, home, *words):
    """Run `lachesis` on the copied home as another host would, and return what it prints."""
    script = ""
    for place in IDENTITIES:
        file = tmp_path / Path(place).name
        if not file.exists():
            file.write_text(f"{secrets.token_hex(16)}\n")
        script += f"mount --bind {file} {place} && "
    command = ["unshare", "--mount", "sh", "-c", f'{script}exec "$@"', "sh"]
    done = subprocess.run(
        [*command, sys.executable, "-m", "lachesis.cli.main", *words],
        env={**StruckHome(home).env(), "COLUMNS": "200"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout + done.stderr


@needs_root
def test_a_home_is_copied_to_another_host_while_its_run_goes_on(served, tmp_path, row):
    run = served.take("running")
    run.reach("running")
    copy = tmp_path / "copy"
    shutil.copytree(served.home, copy, symlinks=True, ignore=shutil.ignore_patterns("*.lock"))
    record = copy / "runs" / run.run_id / "run.json"
    before = record.read_bytes()
    for words in (("runs",), ("status", run.run_id), ("results", run.run_id), ("doctor", "--fix")):
        printed = run_elsewhere(tmp_path, copy, *words)
        assert "Traceback" not in printed
    assert record.read_bytes() == before, "reading writes nothing"
    printed = run_elsewhere(tmp_path, copy, "status", run.run_id)
    assert "running" in printed, printed
    assert f"run {run.run_id} was begun on" in " ".join(printed.split())
    run.advances()
    # Who is there may say that it is over in the copy, and go on with it there.
    os.utime(copy / "runs" / run.run_id / ".alive", (1, 1))
    printed = run_elsewhere(tmp_path, copy, "stop", run.run_id)
    assert b'"host_lost"' in record.read_bytes(), printed
    run.advances()
    assert run.seen().status == "running"
    served.current = run
    row(
        fault="home copied to another host",
        phase="running",
        expected="read, not written",
        seen="read, not written",
        kept=run.kept(),
    )


CHANGES = {
    "resume": "from lachesis.operations.runs import resume_run as f; f(RunStore(), sys.argv[1])",
    "remove": "from lachesis.operations.runs import remove_runs as f; f(RunStore(), [sys.argv[1]])",
    "edit": "from lachesis.operations.runs import edit_labels as f; f(RunStore(), sys.argv[1], "
    "name='n')",
}


@pytest.mark.parametrize("number", [2, 3, 4, 5])
def test_resumes_removals_and_edits_at_once(served, row, number):
    """The run is resumed once or removed, and who did not get what he asked for is told."""
    run = served.start(total_steps=400)
    run.reach("running")
    run.stop()
    kinds = ["resume", "remove", "edit", "resume", "remove"][:number]

    def change(kind):
        code = f"import sys; from lachesis.runs.store import RunStore; {CHANGES[kind]}"
        done = subprocess.run(
            [sys.executable, "-c", code, run.run_id],
            env=served.env(),
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        return kind, done.returncode, done.stderr

    with ThreadPoolExecutor(number) as pool:
        outcomes = list(pool.map(change, kinds))
    done = Counter(kind for kind, code, _ in outcomes if code == 0)
    problems = [error.splitlines()[-1] for _, code, error in outcomes if code]
    assert all("lachesis.base.errors." in problem for problem in problems), problems
    if run.dir.record.exists():
        assert done["resume"] == kinds.count("resume"), "all of them are told of the one attempt"
        assert not done["remove"], problems
        run.advances(1)
        assert run.record.attempt == 2
        run.stop(now=True)
        outcome = "resumed once"
    else:
        assert done["remove"] >= 1
        assert not run.dir.path.exists()
        assert not served.processes(run.dir.path)
        outcome = "removed"
    row(
        fault=f"{' '.join(kinds)} at once",
        phase="ended",
        expected="one of them",
        seen=f"{outcome}; {len(problems)} refused",
    )
