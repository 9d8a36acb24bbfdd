"""Services that die while another one is being started again."""

import json
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from lachesis.base.errors import ProcessExitedError
from lachesis.runs.store import RunStore
from lachesis.supervision import restarts
from lachesis.supervision.readiness import RunServices
from lachesis.supervision.running_services import ServiceGroup, make_exit_error
from lachesis.supervision.services.spec import ServiceSpec
from lachesis.supervision.stop_requests import StopCheck
from tests.harness.home import make_record
from tests.harness.waiting import wait_until

RUN = "0123abcd"
ENVIRONMENTS = {"environment": "one", "environment-two": "two"}


class World:
    """Engine, API, trainer and two environments that have each given a group; none of them does
    anything.
    """

    def __init__(self, home, group):
        self.group, self.store = group, (store := RunStore(home))
        record = make_record(run_id=RUN)
        self.folder = store.create(record)
        self.ready = threading.Event()
        """Whether the first environment is ready, once it has been started."""
        self.ready.set()
        self.specs = {
            name: self._spec(name) for name in ("engine", "api", "trainer", *ENVIRONMENTS)
        }
        self.pids = {name: group.start(spec) for name, spec in self.specs.items()}
        for name in ENVIRONMENTS:
            self.folder.get_counters_file(name).write_text(
                json.dumps({"groups": 3, "written_at": time.time()})
            )
        self.forgotten: list[int] = []
        plan: Any = SimpleNamespace(
            environment_names=ENVIRONMENTS,
            services=list(self.specs.values()),
            get_service=self.specs.__getitem__,
            make_restart_spec=lambda service, groups, env_id: self.specs[service],
        )
        self.again = restarts.ServiceRestarter(
            RunServices(group, store, RUN, self._do_step), plan, StopCheck(store, RUN, lambda: None)
        )

    def _spec(self, name):
        def ready():
            return "" if name != "environment" or self.ready.is_set() else "not yet"

        log = self.folder.get_log_file(name)
        argv = [sys.executable, "-c", "import time; time.sleep(600)"]
        return ServiceSpec(
            name, argv, log=log, cwd=log.parent, check_ready=ready, timeout_s=30.0, grace_s=2.0
        )

    def _do_step(self, name, work):
        result = work()
        if name.startswith("start "):
            service = name.removeprefix("start ")
            self.pids[service] = int(str(self.again.services.unwritten[service]["pid"]))
        return result

    def kill(self, name):
        os.kill(self.pids[name], signal.SIGKILL)
        assert self.group.wait(name, timeout_s=5) == -signal.SIGKILL
        return make_exit_error(self.specs[name], -signal.SIGKILL)

    def kill_while_it_starts(self, victim):
        """Kill that one once the first environment was started again, and before it is ready."""
        before = self.pids["environment"]
        self.ready.clear()

        def wait_and_kill():
            wait_until(lambda: self.pids["environment"] != before, 20, poll_s=0.02)
            self.kill(victim)
            self.ready.set()

        killer = threading.Thread(target=wait_and_kill)
        killer.start()
        return killer


@pytest.fixture
def world(tmp_path, monkeypatch):
    with ServiceGroup() as group:
        made = World(tmp_path, group)
        monkeypatch.setattr(made.again.restart_budget, "next_pause_s", lambda service: 0.1)
        monkeypatch.setattr(restarts, "fetch_trainer_health", lambda plan: {"groups": 5})
        monkeypatch.setattr(restarts, "count_registered_environments", lambda plan: 2)
        monkeypatch.setattr(
            restarts, "disconnect_environment", lambda plan, number: made.forgotten.append(number)
        )
        yield made


def test_two_environments_that_die_together_are_both_started_again(world):
    problems = {name: world.kill(name) for name in ENVIRONMENTS}
    for name, problem in problems.items():
        assert name in world.group.collect_exit_codes()
        world.again.restart(name, problem)
    assert world.group.collect_exit_codes() == {}
    assert sorted(world.forgotten) == [0, 1]


def test_groups_of_an_earlier_attempt_earn_no_restart(world):
    world.folder.get_counters_file("environment").write_text(
        json.dumps({"groups": 3, "written_at": 1.0})
    )
    problem = world.kill("environment")
    with pytest.raises(ProcessExitedError, match="environment was killed by signal 9"):
        world.again.restart("environment", problem)


def test_one_that_has_ended_well_ends_no_restart(world):
    world.group.stop("environment-two")
    world.again.restart("environment", world.kill("environment"))
    assert world.group.is_running("environment")


@pytest.mark.parametrize("victim", ["environment", "environment-two", "api"])
def test_a_death_meanwhile_is_left_to_the_next_look(world, victim):
    """Of the one that is being started, of another one, and of the API, after which all
    environments are started again.
    """
    problem = world.kill("environment")
    killer = world.kill_while_it_starts(victim)
    world.again.restart("environment", problem)
    killer.join()
    assert set(world.group.collect_exit_codes()) == {victim}
    world.again.restart(victim, make_exit_error(world.specs[victim], -signal.SIGKILL))
    assert world.group.collect_exit_codes() == {}
    assert all(world.group.is_running(name) for name in world.specs)


def test_an_environment_that_dies_while_the_api_starts_keeps_the_others_from_nothing(world):
    problem = world.kill("api")
    killer = world.kill_while_it_starts("environment")
    world.again.restart("api", problem)
    killer.join()
    assert set(world.group.collect_exit_codes()) == {"environment"}
    assert world.group.is_running("environment-two")


def test_the_death_of_the_trainer_ends_the_restart(world):
    problem = world.kill("environment")
    killer = world.kill_while_it_starts("trainer")
    with pytest.raises(ProcessExitedError, match="trainer was killed by signal 9"):
        world.again.restart("environment", problem)
    killer.join()
