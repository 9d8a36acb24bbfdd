"""Which part is waited for, and since when."""

import time
from datetime import datetime

import pytest

from lachesis.monitor.observe import Observation
from lachesis.monitor.stalls import PHASE_TIME_KEYS, find_stall
from lachesis.runs.record import ServiceRecord
from lachesis.runs.store import RunStore
from tests.harness.home import make_record

NOW = time.time()
ALIVE = {"written_at": NOW, "last_group_at": NOW - 300, "empty_groups": 0, "errors": {}}


def look(tmp_path, **changes):
    """A run whose trainer waits for rollouts since 100 s; everything answers."""
    services = {
        name: ServiceRecord(pid=100, port=1, log="x")
        for name in ("engine", "api", "trainer", "environment")
    }
    record = make_record(status="running", phase="training", services=services)
    seen = Observation(
        record,
        RunStore(tmp_path).dir(record.run_id),
        observed_at=NOW,
        api_counts={"queue_size": 0},
        is_engine_alive=True,
    )
    seen.process_states = dict.fromkeys(services, "sleeping")
    seen.trainer_health = {"waiting_for": "rollouts", "since": NOW - 100}
    seen.environment_counts = dict(ALIVE)
    seen.last_steps = [{"step": 1, **dict.fromkeys(PHASE_TIME_KEYS.values(), 1.0)}]
    for name, value in changes.items():
        setattr(seen, name, value)
    return seen


def waits(what, for_s=100):
    return {"trainer_health": {"waiting_for": what, "since": NOW - for_s}}


@pytest.mark.parametrize(
    ("changes", "part", "ago", "said"),
    [
        (
            {
                "process_states": {"environment": "stopped"},
                "environment_counts": {**ALIVE, "written_at": NOW - 7},
            },
            "environment",
            7,
            "stopped by a signal",
        ),
        (
            {"process_states": {"trainer": "stopped"}, "trainer_health": None},
            "trainer",
            0,
            "pid 100",
        ),
        (
            {"environment_counts": {**ALIVE, "written_at": NOW - 90}},
            "environment",
            90,
            "no sign of life for 90 s",
        ),
        ({"environment_counts": None}, "environment", 100, "has not reported anything yet"),
        (
            {
                "environment_counts": {**ALIVE, "written_at": NOW - 90},
                "blocked_at": "verify() at /my/env.py:35",
            },
            "environment",
            90,
            "its event loop has been blocked for 90 s in verify() at /my/env.py:35; `await "
            "asyncio.to_thread(...)` around such a call",
        ),
        (
            {
                "environment_counts": {
                    **ALIVE,
                    "written_at": NOW - 12,
                    "in_request": 3,
                    "request_since": NOW - 80,
                },
                "blocked_at": "verify() at /my/env.py:35",
            },
            "environment",
            12,
            "has been blocked for 12 s in verify()",
        ),
        (
            {"environment_counts": {**ALIVE, "items_used_up": 37}},
            "environment",
            300,
            "its items are used up: get_next_item() returned None after 37 items",
        ),
        (
            {"environment_counts": {**ALIVE, "in_request": 3, "request_since": NOW - 80}},
            "sampler",
            80,
            "3 requests for samples",
        ),
        (
            {"environment_counts": {**ALIVE, "item_since": NOW - 70}},
            "environment",
            70,
            "get_next_item() has not returned for 70 s",
        ),
        (
            {"environment_counts": {**ALIVE, "in_group": 2, "group_since": NOW - 75}},
            "environment",
            75,
            "its scoring does not end",
        ),
        (
            {"environment_counts": {**ALIVE, "errors": {"ValueError: x": 7}}},
            "environment",
            300,
            "no usable group: ValueError: x (7 times)",
        ),
        (
            {
                "environment_counts": {**ALIVE, "last_group_at": NOW - 1},
                "api_counts": {"queued": {"5": 3}, "batch_size": 32},
            },
            "API queue",
            100,
            "the groups that wait (3 of 5 rollouts) do not fill one: a batch takes exactly 32 "
            "rollouts",
        ),
        (
            {
                "environment_counts": {**ALIVE, "last_group_at": NOW - 1},
                "api_counts": {"turn": "slow"},
            },
            "environment",
            1,
            "it is the turn of slow",
        ),
        (
            {"api_counts": {"refused": 4, "refusal": "a score is nan"}},
            "API queue",
            100,
            "has refused 4 groups: a score is nan",
        ),
        (
            {"environment_counts": {**ALIVE, "last_group_at": NOW - 1, "dropped_rollouts": 64}},
            "rollouts",
            100,
            "64 rollouts were dropped",
        ),
        (
            waits("forward_backward"),
            "forward_backward",
            100,
            "the trainer has been waiting for the answer of the engine",
        ),
        (waits("optim_step"), "optim_step", 100, "the trainer has been waiting for the answer"),
        (waits("sampler"), "sampler", 100, "new sampling weights"),
        (waits("checkpoint"), "checkpoint", 100, "a save"),
    ],
)
def test_the_part_that_has_to_move_next_is_named(tmp_path, changes, part, ago, said):
    stall = find_stall(look(tmp_path, **changes), {})
    assert stall is not None
    assert stall.part == part
    assert datetime.fromisoformat(stall.since).timestamp() == pytest.approx(NOW - ago, abs=1.5)
    assert said in stall.evidence


@pytest.mark.parametrize("name", ["trainer", "api", "engine"])
def test_a_service_that_does_not_answer_is_named_after_a_while(tmp_path, name):
    seen = look(tmp_path, **waits("rollouts", 5))
    assert find_stall(seen, {name: NOW - 30}) is None
    stall = find_stall(seen, {name: NOW - 61})
    assert stall is not None
    assert (stall.part, "has not answered for 61 s" in stall.evidence) == (name, True)


def test_what_is_slow_as_always_is_no_stall(tmp_path):
    steps = [{"step": number, "time/rollouts": 40.0} for number in range(9)]
    assert find_stall(look(tmp_path, last_steps=steps), {}) is None
    assert find_stall(look(tmp_path, last_steps=steps, **waits("rollouts", 201)), {}) is not None
    assert find_stall(look(tmp_path, **waits("rollouts", 59)), {}) is None


def test_a_first_batch_may_take_its_time(tmp_path):
    """There is no usual length yet; a process that gives no sign of life is named all the same."""
    assert find_stall(look(tmp_path, last_steps=[], **waits("rollouts", 290)), {}) is None
    assert find_stall(look(tmp_path, last_steps=[], **waits("rollouts", 301)), {}) is not None
    silent = find_stall(
        look(tmp_path, last_steps=[], environment_counts={**ALIVE, "written_at": NOW - 90}), {}
    )
    assert silent is not None
    assert silent.part == "environment"


def test_a_flow_that_stands_still_is_named(tmp_path):
    stall = find_stall(
        look(tmp_path, process_states={"flow": "stopped"}, **waits("rollouts", 1)), {}
    )
    assert stall is not None
    assert stall.part == "flow"


def test_a_run_that_starts_evaluates_or_ends_cannot_stall(tmp_path):
    for changes in ({"status": "starting"}, {"phase": "evaluating"}, {"status": "stopping"}):
        seen = look(tmp_path)
        seen.record = seen.record.model_copy(update=changes)
        assert find_stall(seen, {}) is None


def test_a_wait_for_an_evaluation_after_the_last_step_is_no_stall(tmp_path):
    """The trainer gives it up by itself. A service that does not answer is named all the same."""
    assert find_stall(look(tmp_path, **waits("evaluation", 500)), {}) is None
    assert find_stall(look(tmp_path, **waits("evaluation", 500)), {"engine": NOW - 61}) is not None


def test_groups_that_were_empty_are_counted_in_the_explanation(tmp_path):
    """Without a reason of its own, an environment that drops every group says at least that."""
    stall = find_stall(look(tmp_path, environment_counts={**ALIVE, "empty_groups": 7}), {})
    assert stall is not None
    assert "returns no usable group: 7 groups were empty" in stall.evidence
