"""Prefect answers late or never, while a disk is full, a host reboots, a home moves: a start is
neither lost nor doubled.
"""

import contextlib
import json
import shutil
from pathlib import Path

import pytest

from lachesis.config.launch_spec import TestSpec
from lachesis.operations.inference_tests import get_test, start_test
from lachesis.operations.runs import resume_run
from lachesis.prefect_client.resources import PrefectApi
from lachesis.prefect_client.serve_info import server_file
from tests.faults.struck_home import StruckHome
from tests.faults.test_disks import disk, fill, needs_root  # noqa: F401
from tests.faults.test_hosts import power_off
from tests.harness.home import share_schemas
from tests.prefect_client.late_answers import Fault, delay_answers

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200), pytest.mark.matrix]
ANSWERS: dict[str, tuple[Fault, float]] = {
    "at once": ("none", 0.0),
    "9 s late": ("answer late", 9.0),
    "20 s late": ("answer late", 20.0),
    "never": ("answer lost", 0.0),
    "never, and nothing arrives": ("request lost", 0.0),
}
# Whoever has submitted may take 25 s by itself; then the runner looks every five seconds.
SENT_AGAIN_S = 90.0


@contextlib.contextmanager
def faulty_answers(served, answer):
    """Let commands and tools reach the server of the served only through what loses answers.

    The runner and the flows have the server's own address.
    """
    file = server_file(served.home)
    text = file.read_text()
    info = json.loads(text)
    with delay_answers(info["api_url"]) as faults:
        faults.fault, faults.delay_s = ANSWERS[answer]
        file.write_text(json.dumps({**info, "api_url": faults.url}))
        try:
            yield faults
        finally:
            if file.exists():
                file.write_text(text)


def count_flow_runs(key):
    body = {"flow_runs": {"idempotency_key": {"any_": [key]}}}
    return len(PrefectApi()._request("POST", "/flow_runs/filter", body) or [])


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_start_begins_once(served, row, answer):
    with faulty_answers(served, answer):
        run = served.start()
        answered = run.record
    assert answered.status in ("pending", "starting", "running"), answered.error
    run.reach("running")
    assert count_flow_runs(run.record.submission_key) == 1
    assert (run.record.attempt, run.seen().status) == (1, "running")
    assert run.stop(now=True).status == "stopped"
    row(
        fault=f"Prefect answers {answer}",
        phase="start",
        expected="one run",
        seen=f"told: {answered.phase}; one run",
    )


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_resume_begins_once(served, row, answer):
    run = served.take("running")
    run.reach("running")
    attempt = run.stop().attempt
    with faulty_answers(served, answer):
        resumed = resume_run(served.store, run.run_id)
    assert (resumed.attempt, resumed.error) == (attempt + 1, None)
    served.wait(lambda: run.record.resumed, SENT_AGAIN_S, "the resume")
    run.advances()
    assert count_flow_runs(run.record.submission_key) == 1
    assert (run.record.attempt, run.seen().status) == (attempt + 1, "running")
    served.current = run
    row(
        fault=f"Prefect answers {answer}",
        phase="resume",
        expected="one attempt",
        seen="one attempt",
        kept=run.kept(),
    )


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_test_begins_once(served, row, answer):
    spec = TestSpec(
        environment="steady",
        models=[f"embedded:{served.model}"],
        steps=1,
        group_size=2,
        settings="max_token_length=32",
    )
    with faulty_answers(served, answer):
        test = start_test(served.store, spec)
    assert test.error is None
    ended = served.wait(
        lambda: (seen := get_test(served.store, test.test_id)).has_ended and seen,
        SENT_AGAIN_S + 120,
        "the end of the test",
        0.5,
    )
    assert ended.status == "completed", ended.error
    assert count_flow_runs(test.submission_key) == 1
    row(fault=f"Prefect answers {answer}", phase="test", expected="one test", seen="one test")


@needs_root
def test_a_start_is_pending_while_the_disk_is_full(
    served,
    disk,  # noqa: F811
    row,
):
    with faulty_answers(served, "never"):
        run = served.start()
    filler = fill(disk)
    served.wait(
        lambda: count_flow_runs(run.record.submission_key) == 1, SENT_AGAIN_S, "the flow run"
    )
    filler.unlink()
    served.wait(lambda: run.seen().flow_run_id or run.seen().has_ended, SENT_AGAIN_S, "the answer")
    if run.seen().has_ended:  # Its flow may have begun on the full disk.
        run.gone()
        assert "No space left" in (run.record.error or ""), run.record.error
        run.resume()
    run.reach("running")
    assert count_flow_runs(run.record.submission_key) == 1
    run.stop(now=True)
    row(fault="disk full", phase="pending", expected="one run", seen="one run")


def test_a_start_is_pending_while_the_host_reboots(served, row):
    with faulty_answers(served, "never, and nothing arrives"):
        run = served.start()
        assert run.record.flow_run_id is None
        power_off(served)
    served.serve()
    run.reach("running")
    assert count_flow_runs(run.record.submission_key) == 1
    served.current = run
    row(fault="host reboots", phase="pending", expected="one run", seen="one run")


def test_a_start_is_pending_while_the_home_moves(
    served, tiny_model, schemas, tmp_path, monkeypatch, row
):
    """It moves to another folder of its host; a copy on another host sends nothing."""
    served.end_all_runs()
    before = tmp_path / "before"
    before.mkdir()
    (before / "models").symlink_to(tiny_model / "models")
    share_schemas(before, schemas)
    monkeypatch.setenv("LACHESIS_HOME", str(before))
    first = StruckHome(before)
    first.model = str((before / "models").resolve() / Path(first.model).name)
    first.serve()
    with faulty_answers(first, "never, and nothing arrives"):
        run_id = first.start().run_id
        first.stop_serving()
    assert first.store.load(run_id).flow_run_id is None
    after = tmp_path / "after"
    shutil.move(before, after)
    monkeypatch.setenv("LACHESIS_HOME", str(after))
    second = StruckHome(after)
    try:
        second.serve()
        second.wait(
            lambda: second.store.load(run_id).status == "running", SENT_AGAIN_S + 60, "training"
        )
        assert count_flow_runs(f"{run_id}-1") == 1
    finally:
        second.end_all_runs()
        second.stop_serving()
    row(fault="home moves", phase="pending", expected="one run", seen="one run")
