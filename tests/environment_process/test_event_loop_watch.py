"""An event loop that is blocked is noticed, and the line at which it stands is known."""

import asyncio
import json
import subprocess
import sys
import time
from typing import Any

import pytest

from lachesis.environment_process import event_loop_watch
from lachesis.environment_process.event_loop_watch import LoopWatch
from lachesis.environment_process.rollout_counters import RolloutCounters
from lachesis.runs.environment_counters import find_blocked_line
from tests.harness.waiting import wait_until

PROGRAM = """\
import asyncio, re, sys, time
from pathlib import Path
from lachesis.environment_process import event_loop_watch
from lachesis.environment_process.rollout_counters import RolloutCounters

event_loop_watch.STACK_AFTER_S, event_loop_watch.WATCH_INTERVAL_S = 0.5, 0.1
event_loop_watch.LOCKED_AFTER_S = 1.0
folder = Path(sys.argv[1])

def verify():
    {call}

class Env:
    async def env_manager(self):
        await asyncio.sleep(0.2)
        verify()
        await asyncio.sleep(60)

watch = event_loop_watch.LoopWatch(
    RolloutCounters(folder / "environment.json"), folder / "environment.stack", folder
)
watch.install(Env)
asyncio.run(Env().env_manager())
"""
CALL_LINE = 1 + PROGRAM.split("{call}")[0].count("\n")


@pytest.fixture
def start(tmp_path):
    """Start a program whose event loop makes this call, and give its file."""
    processes = []

    def start_program(call):
        program = tmp_path / "my_env.py"
        program.write_text(PROGRAM.format(call=call))
        processes.append(subprocess.Popen([sys.executable, str(program), str(tmp_path)]))
        return program

    yield start_program
    for process in processes:
        process.kill()
        process.wait()


def wait_for_line(folder, is_there):
    file = folder / "environment.json"
    wait_until(lambda: bool(find_blocked_line([file])) == is_there, 60)
    return find_blocked_line([file])


@pytest.mark.parametrize(
    "call", ["time.sleep(60)", 're.match("(a*)*b", "a" * 40)', "while True: pass", "time.sleep(2)"]
)
def test_the_line_of_the_environment_is_found(start, tmp_path, call):
    """Also where the call keeps all threads from running, or only computes."""
    program = start(call)
    counts_file = tmp_path / "environment.json"
    assert wait_for_line(tmp_path, is_there=True) == f"verify() at {program}:{CALL_LINE}"
    written_at = json.loads(counts_file.read_text())["written_at"]
    if call == "time.sleep(2)":
        wait_for_line(tmp_path, is_there=False)
        time.sleep(event_loop_watch.BEATS_PER_WRITE * event_loop_watch.BEAT_INTERVAL_S + 1.0)
        assert json.loads(counts_file.read_text())["written_at"] > written_at
    else:
        time.sleep(1.0)
        assert json.loads(counts_file.read_text())["written_at"] == written_at, "no heartbeat"


@pytest.mark.parametrize(
    "content", ["", "0x01 /a\n", "0x01 /a\nThread 0x02 (most recent call first):\n  nothing\n"]
)
def test_a_file_without_a_stack_of_the_loop_names_no_line(tmp_path, content):
    (tmp_path / "environment.stack").write_text(content)
    (tmp_path / "environment.json").write_text('{"written_at": 5.0}')
    assert find_blocked_line([tmp_path / "environment.json"]) is None
    assert find_blocked_line([]) is None


def test_the_environment_that_is_silent_for_longest_is_named(tmp_path):
    """Its innermost frame is named where no frame is in the environment's folder."""
    for name, written_at in (("environment", 9.0), ("environment-b", 5.0)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"written_at": written_at}))
        (tmp_path / f"{name}.stack").write_text(
            "0x01 /elsewhere\nThread 0x02 (most recent call first):\n"
            '  File "/other.py", line 3 in other\n\nThread 0x01 (most recent call first):\n'
            f'  File "/{name}.py", line 7 in inner\n  File "/main.py", line 1 in main\n'
        )
    files = sorted(tmp_path.glob("*.json"))
    assert find_blocked_line(files) == "inner() at /environment-b.py:7"
    assert find_blocked_line(files, since=6.0) == "inner() at /environment.py:7"
    assert find_blocked_line(files, since=10.0) is None


def block(seconds):
    time.sleep(seconds)


async def test_the_time_for_which_an_evaluation_blocks_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(event_loop_watch, "BEAT_INTERVAL_S", 0.02)
    monkeypatch.setattr(event_loop_watch, "MAX_BEAT_DELAY_S", 0.3)
    counters = RolloutCounters(tmp_path / "environment.json")
    watch = LoopWatch(counters, tmp_path / "environment.stack", tmp_path)

    async def manage(env):
        await asyncio.sleep(0.1)
        block(0.5)  # not during an evaluation
        with watch.count_evaluation():
            await asyncio.sleep(0.2)
        assert counters.counts["eval_blocked_s"] == 0
        with watch.count_evaluation():
            block(0.7)
            await asyncio.sleep(0.1)
            block(0.7)

    cls: Any = type("Env", (), {"env_manager": manage})
    watch.install(cls)
    await cls().env_manager()
    assert 1.2 < counters.counts["eval_blocked_s"] < 5
    assert json.loads(counters.file.read_text())["eval_blocked_s"] > 1.2


def test_a_stack_that_cannot_be_written_does_not_end_the_environment(tmp_path):
    counters = RolloutCounters(tmp_path / "environment.json")
    LoopWatch(counters, tmp_path / "absent" / "environment.stack", tmp_path)
    assert counters.file.is_file()
    assert find_blocked_line([counters.file]) is None
