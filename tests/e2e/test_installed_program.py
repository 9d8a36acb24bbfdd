"""The program from the built wheel alone, in an empty folder, as `uvx` and `pipx` install it."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import openai
import pytest

from lachesis.supervision.services.ports import reserve_free_ports
from tests.harness.served_home import processes_under

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def installed_command(tmp_path_factory):
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


def test_the_whole_work_is_done_from_the_wheel_in_an_empty_folder(
    installed_command, new_home, tmp_path
):
    """The demo, another run like it, what they did, and what the model answers now.

    The second run starts a server in the background, because none runs.
    """
    home = new_home()
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env |= {"LACHESIS_HOME": str(home), "LACHESIS_NO_SERVE": "0"}
    package = installed_command.parents[1]
    files_before = _list_files(package)

    def run(*words):
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

    def start(*words):
        command = [installed_command, *words]
        return subprocess.Popen(
            command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    checks = {check["name"]: check for check in run("doctor")["checks"]}
    assert checks["flows"]["ok"]
    assert str(package) in checks["flows"]["found"]
    results = run("demo", "--steps", "3")
    (shown,) = run("runs")["runs"]
    assert (shown["run_id"], shown["status"]) == (results["run_id"], "completed")
    try:
        _work_on(run, start, results["run_id"])
    finally:
        assert run("serve", "--stop")["stopped"]
    assert list(tmp_path.iterdir()) == []
    assert _list_files(package) == files_before, "the installed package is not written to"
    assert processes_under(home) == {}


def _work_on(run, start, first):
    """Begin a run like the first one, compare both, and use what was trained."""
    like = ("train", "--like", "@last", "--set", "learning_rate=0.0005", "--name", "slower")
    second = run(*like, "--watch")["run_id"]
    comparison = run("compare", first[:7], "@last")
    assert comparison["differing"] == {"tinker.learning_rate": {first: 0.0015, second: 0.0005}}
    worst = run("rollouts", first, "--worst", "3")["rollouts"]
    assert len(worst) == 3
    assert all(rollout["prompt"] and rollout["score"] is not None for rollout in worst)
    assert run("ask", second, "3+4=", "--checkpoint", "base")["step"] is None
    answer = run("ask", second, "3+4=", "-n", "2", "--temperature", "1")
    assert (answer["step"], len(answer["answers"])) == (3, 2)
    _ask_endpoint(start, second)
    longer = run("resume", second, "--set", "total_steps=5", "--watch")
    assert (longer["status"], longer["final_metrics"]["step"]) == ("completed", 5)
    steps = [point["step"] for point in longer["held_out_curve"]]
    assert {0, 3, 5} <= set(steps), "the result after its former last step is kept"
    rows = {row["run_id"]: row for row in run("runs", "--sort", "steps")["runs"]}
    assert list(rows) == [second, first]
    assert (rows[second]["name"], rows[second]["total_steps"]) == ("slower", 5)


def _ask_endpoint(start, run_id):
    """Ask the trained model by the client of OpenAI, until Ctrl-C ends the server."""
    (port,) = reserve_free_ports(1)
    process = start("serve-model", run_id, "--checkpoint", "3", "--port", str(port))
    assert process.stdout is not None
    shown = [process.stdout.readline() for _ in range(4)]
    process.stdout.close()
    assert shown[0].startswith(f"the weights of step 3 of run {run_id}"), shown
    token_file = Path(shown[3].split("the token in ")[1].strip())
    url, model = shown[1].split()[-1], shown[2].split(maxsplit=1)[1].strip()
    client = openai.OpenAI(base_url=url, api_key=token_file.read_text().strip())
    assert [one.id for one in client.models.list()] == [model]
    messages: Any = [{"role": "user", "content": "3+4="}]
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=8)
    assert answer.choices[0].message.role == "assistant"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=url, api_key="wrong").chat.completions.create(
            model=model, messages=messages
        )
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130


def _list_files(folder):
    return sorted(file for file in folder.rglob("*") if "__pycache__" not in file.parts)
