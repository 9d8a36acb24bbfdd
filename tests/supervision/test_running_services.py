"""Services end in reverse order, whatever happens to the process that started them."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lachesis.base.errors import HealthTimeoutError, ProcessExitedError
from lachesis.supervision.readiness import wait_until_ended, wait_until_healthy
from lachesis.supervision.running_services import ServiceGroup
from lachesis.supervision.services.ports import reserve_free_ports
from lachesis.supervision.services.spec import ServiceSpec, make_http_readiness_check
from tests.harness.waiting import wait_until

CHILD = str(Path(__file__).parents[1] / "harness" / "simple_service.py")


def spec(name, tmp_path, *argv, **options):
    values = {"log": tmp_path / f"{name}.log", "cwd": tmp_path, **options}
    return ServiceSpec(name, [sys.executable, CHILD, *argv], **values)  # type: ignore[arg-type]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_services_end_in_reverse_order(tmp_path):
    """The last one started is told to end first, and each has ended before the next is told."""
    notes = tmp_path / "notes"
    with ServiceGroup() as group:
        for name in ("first", "second", "third"):
            group.start(spec(name, tmp_path, "note", str(notes), name))
        wait_until(
            lambda: all(
                "ready note" in (tmp_path / f"{n}.log").read_text()
                for n in ("first", "second", "third")
            ),
            10,
        )
    assert notes.read_text().split() == ["third", "second", "first"]


def test_the_cause_of_an_engine_that_cannot_load_its_model_comes_first_and_is_all(tmp_path):
    """Its log may hold a screen of retries before the cause."""
    command = [
        sys.executable,
        "-m",
        "lachesis.engine",
        "--model",
        "Qwen/DoesNotExist",
        "--store",
        str(tmp_path),
    ]
    engine = ServiceSpec(
        "engine",
        [*command, "--port", str(reserve_free_ports(1)[0])],
        log=tmp_path / "engine.log",
        cwd=tmp_path,
        env={"LACHESIS_ENGINE_TOKEN": "tml-x", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
    )
    with ServiceGroup() as group:
        group.start(engine)
        assert group.wait("engine", timeout_s=150) == 1
        with pytest.raises(ProcessExitedError) as caught:
            group.require_running("engine")
    begin = (
        "engine exited with code 1: model_not_found: the model Qwen/DoesNotExist cannot be loaded: "
    )
    assert str(caught.value).startswith(begin)
    assert "\n" not in str(caught.value)
    assert begin.partition(": ")[2] in engine.log.read_text()


def test_a_dead_child_fails_the_wait_at_once_with_its_last_words(tmp_path):
    """We do not sit out the timeout of a process that has already exited."""
    port = reserve_free_ports(1)[0]
    with ServiceGroup() as group:
        one = spec(
            "trainer",
            tmp_path,
            "exit",
            "3",
            check_ready=make_http_readiness_check(f"http://127.0.0.1:{port}/"),
            timeout_s=50,
        )
        group.start(one)
        started = time.monotonic()
        with pytest.raises(
            ProcessExitedError,
            match=r"^trainer exited with code 3; its last line: the reason; see .*trainer\.log$",
        ):
            wait_until_healthy(group, one)
        assert time.monotonic() - started < 10


def test_a_child_that_hangs_is_given_up_after_its_time(tmp_path):
    """The message holds what it answered last."""
    port = reserve_free_ports(1)[0]
    with ServiceGroup() as group:
        one = spec(
            "api",
            tmp_path,
            "sleep",
            check_ready=make_http_readiness_check(f"http://127.0.0.1:{port}/"),
            timeout_s=0.5,
        )
        group.start(one)
        with pytest.raises(
            HealthTimeoutError, match=r"api is not healthy after 0 s \(last response: ConnectError"
        ):
            wait_until_healthy(group, one)


def test_a_wait_ends_with_what_is_raised_meanwhile(tmp_path):
    """As when somebody stops the run while one of its services starts, or while it is evaluated."""

    def look():
        raise InterruptedError("somebody has suspended it")

    with ServiceGroup() as group:
        one = spec("engine", tmp_path, "sleep", check_ready=lambda: "not yet", timeout_s=60)
        group.start(one)
        started = time.monotonic()
        with pytest.raises(InterruptedError):
            wait_until_healthy(group, one, on_poll=look)
        with pytest.raises(InterruptedError):
            wait_until_ended(group, one, [], on_poll=look)
        assert time.monotonic() - started < 30


def test_a_healthy_child_is_noticed(tmp_path):
    port = reserve_free_ports(1)[0]
    with ServiceGroup() as group:
        one = spec(
            "api",
            tmp_path,
            "serve",
            str(port),
            check_ready=make_http_readiness_check(f"http://127.0.0.1:{port}/"),
            timeout_s=20,
        )
        pid = group.start(one)
        assert wait_until_healthy(group, one) < 20
        assert alive(pid)
    assert not alive(pid)


def test_a_deaf_family_is_killed_after_its_grace(tmp_path):
    """A child that ignores SIGTERM, and its own child, are gone when the group is."""
    pids = tmp_path / "pids"
    with ServiceGroup() as group:
        group.start(spec("environment", tmp_path, "family", str(pids), grace_s=0.5))
        wait_until(lambda: "ready deaf" in (tmp_path / "environment.log").read_text(), 10)
        family = [int(pid) for pid in pids.read_text().split()]
    assert not any(alive(pid) for pid in family)


def test_a_death_is_told_at_once_whatever_its_children_do(tmp_path):
    """Its own child, which ignores SIGTERM, has its grace; neither this death nor the next one
    waits for that.
    """
    pids = tmp_path / "pids"
    with ServiceGroup() as group:
        other = group.start(spec("trainer", tmp_path, "sleep"))
        leader = group.start(spec("environment", tmp_path, "family", str(pids), grace_s=6.0))
        wait_until(lambda: "ready deaf" in (tmp_path / "environment.log").read_text(), 10)
        child = int(pids.read_text().split()[1])
        for pid, name in ((leader, "environment"), (other, "trainer")):
            os.kill(pid, signal.SIGKILL)
            assert group.wait(name, timeout_s=3) == -signal.SIGKILL
        assert alive(child)
    assert not alive(child)


def test_a_command_that_does_not_exist_is_told(tmp_path):
    with (
        ServiceGroup() as group,
        pytest.raises(ProcessExitedError, match=r"engine could not be started: .*No such file"),
    ):
        group.start(
            ServiceSpec("engine", ["/no/such/program"], log=tmp_path / "x.log", cwd=tmp_path)
        )


def test_one_service_can_be_stopped_and_the_others_go_on(tmp_path):
    with ServiceGroup() as group:
        group.start(spec("one", tmp_path, "sleep"))
        group.start(spec("two", tmp_path, "sleep"))
        assert group.stop("one") == -signal.SIGTERM
        assert group.is_running("two")
        assert group.collect_exit_codes() == {"one": -signal.SIGTERM}


PARENT = """
import sys, time
from pathlib import Path
from lachesis.supervision.running_services import ServiceGroup
from lachesis.supervision.services.spec import ServiceSpec
with ServiceGroup() as group:
    argv = [sys.executable, sys.argv[1], "sleep"]
    folder = Path(sys.argv[2])
    specs = [
        ServiceSpec(name, argv, log=folder / name, cwd=Path("/"), grace_s=1) for name in ("a", "b")
    ]
    pids = [group.start(spec) for spec in specs]
    Path(sys.argv[2], "pids").write_text(" ".join(map(str, [*pids, group._reaper.pid])))
    time.sleep(600)
"""


@pytest.mark.parametrize("victim", ["parent", "reaper"])
def test_nothing_outlives_a_killed_parent_or_reaper(tmp_path, victim):
    """SIGKILL leaves no chance to clean up, so somebody else has to."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD, str(tmp_path)])
    file = tmp_path / "pids"
    try:
        wait_until(lambda: file.exists() and len(file.read_text().split()) == 3, 10)
        *services, reaper = [int(pid) for pid in file.read_text().split()]
        os.kill(parent.pid if victim == "parent" else reaper, signal.SIGKILL)
        wait_until(lambda: not any(alive(pid) for pid in services), 10)
    finally:
        parent.kill()
        parent.wait()


def test_a_killed_reaper_is_named_and_its_services_families_end(tmp_path):
    """The kernel ends the services with the reaper; their own children are ours to end."""
    pids = tmp_path / "pids"
    with ServiceGroup() as group:
        group.start(spec("environment", tmp_path, "family", str(pids)))
        wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2, 10)
        os.kill(group._reaper.pid, signal.SIGKILL)
        wait_until(lambda: not any(alive(int(pid)) for pid in pids.read_text().split()), 10)
        with pytest.raises(
            ProcessExitedError, match=r"the reaper \(pid \d+\) was killed, and the services with it"
        ):
            group.require_running("environment")


def test_an_answer_that_does_not_come_hides_no_death(tmp_path):
    with ServiceGroup() as group:
        pid = group.start(spec("engine", tmp_path, "sleep"))
        assert group.call_unless_service_dies(lambda: "answer", "none") == "answer"
        with pytest.raises(ValueError, match="of the question"):
            group.call_unless_service_dies(lambda: int("of the question"), 0)
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        started = time.monotonic()
        assert (
            group.call_unless_service_dies(lambda: time.sleep(20) or "late", "a death") == "a death"
        )
        assert (
            group.call_unless_service_dies(lambda: time.sleep(20) or "late", "a death") == "a death"
        ), "until somebody looks at it"
        assert time.monotonic() - started < 5
        assert group.collect_exit_codes() == {"engine": -9}
        assert group.call_unless_service_dies(lambda: "answer", "none") == "answer"


def said(tmp_path, code, **env):
    """The log of a program that ends by itself, and the part before it."""
    with ServiceGroup() as group:
        one = ServiceSpec(
            "child", [sys.executable, "-c", code], log=tmp_path / "child.log", cwd=tmp_path, env=env
        )
        group.start(one)
        assert group.wait("child", timeout_s=30) == 0
    parts = [tmp_path / "child.log.1", tmp_path / "child.log"]
    return "".join(part.read_text() for part in parts if part.exists())


def test_no_secret_reaches_a_log(tmp_path, monkeypatch):
    """Neither one that the child was given nor one that only we have; also when it comes in parts,
    or in one endless line.
    """
    monkeypatch.setenv("OTHER_TOKEN", "zz-of-the-parent")
    code = (
        "import os, sys, time\n"
        "key = os.environ['MY_API_KEY']\n"
        "sys.stdout.write('first ' + key[:6]); sys.stdout.flush(); time.sleep(0.3)\n"
        "print(key[6:], 'zz-of-the-parent')\n"
        "sys.stdout.write((1 << 20) * 'x' + key + 'end')\n"
    )
    text = said(tmp_path, code, MY_API_KEY="sk-0123456789")
    (tmp_path / "child.log").unlink()
    bar = (
        "import os\n"
        "for step in range(200_000): print(end=f'{step} {os.environ[\"MY_API_KEY\"]}\\r')"
    )
    assert "sk-0123456789" not in said(tmp_path, bar, MY_API_KEY="sk-0123456789"), (
        "a progress bar is one line"
    )
    assert "sk-0123" not in text
    assert "3456789" not in text
    assert "of-the-parent" not in text
    assert text.startswith("first *** ***\n")
    assert text.endswith("***end")


def test_a_log_does_not_grow_without_end(tmp_path, monkeypatch):
    """The newest words are kept, within the limit."""
    monkeypatch.setattr("lachesis.supervision.running_services.MAX_SERVICE_LOG_BYTES", 200_000)
    text = said(tmp_path, "for number in range(100_000): print(f'line {number}')")
    assert text.endswith("line 99999\n")
    assert 60_000 < len(text) < 300_000
    lines = text.splitlines()
    assert [int(line.split()[1]) for line in lines] == list(range(100_000 - len(lines), 100_000)), (
        "no line is lost or cut"
    )


def test_a_test_that_prints_without_end_is_given_up(tmp_path):
    """Long before its time is over, in one line."""
    code = "import os\nwhile True: os.write(2, b'x' * 60000)"
    loud = ServiceSpec(
        "environment", [sys.executable, "-S", "-c", code], tmp_path / "loud.log", tmp_path
    )
    started = time.monotonic()
    with ServiceGroup() as group:
        group.start(loud)
        with pytest.raises(ProcessExitedError, match="environment printed more than 50 MB") as told:
            wait_until_ended(group, loud, needs=[])
    assert time.monotonic() - started < 60
    assert len(str(told.value).splitlines()) == 1


def test_a_hurry_spares_nobody(tmp_path):
    """Also when the end is under way already and a service takes its time."""
    hurry = tmp_path / ".now"
    with ServiceGroup(stop_now_file=hurry) as group:
        pid = group.start(spec("slow", tmp_path, "deaf", grace_s=60.0))
        wait_until(lambda: "ready deaf" in (tmp_path / "slow.log").read_text(), 10)
        closing = threading.Thread(target=group.close)
        closing.start()
        wait_until(lambda: "told to end" in (tmp_path / "slow.log").read_text(), 10)
        assert alive(pid)
        hurry.touch()
        closing.join(5)
        assert not closing.is_alive()
    assert not alive(pid)
