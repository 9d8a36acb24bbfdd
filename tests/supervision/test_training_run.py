"""How a run's flow reads and tells what ends it."""

import signal
import traceback
from types import SimpleNamespace

import pytest
from prefect.exceptions import TerminationSignal

from flows import attempts, train
from lachesis.base.errors import ModelNotFoundError, ValidationMissingError
from lachesis.base.timestamps import now_iso
from lachesis.config import run_config as run_config
from lachesis.monitor import run_health
from lachesis.monitor.run_health import refresh_health
from lachesis.monitor.tick import Monitor
from lachesis.runs.end_causes import EndCause
from lachesis.runs.folder import RunDir
from lachesis.runs.store import RunStore
from lachesis.supervision import training_run
from lachesis.supervision.readiness import RunServices
from lachesis.supervision.services.plan import make_training_plan
from lachesis.supervision.stop_requests import StopRequested
from lachesis.supervision.training_run import TrainingRun
from tests.harness.home import make_record, write_run


def caught(*errors):
    """The last of errors, each raised while the one before was handled."""
    before: BaseException | None = None
    for error in errors:
        error.__context__ = before
        before = error
    assert before is not None
    return before


def test_a_signal_is_seen_behind_the_error_that_came_of_it():
    asked = TerminationSignal(signal.SIGTERM)
    assert train.find_termination_signal(asked) is asked
    assert (
        train.find_termination_signal(
            caught(asked, ValueError("Task run is not set"), RuntimeError("left the task"))
        )
        is asked
    )
    assert (
        train.find_termination_signal(
            caught(ValueError("of the run"), RuntimeError("left the task"))
        )
        is None
    )


def test_a_failure_is_told_without_secrets(tmp_path, monkeypatch):
    """In the run's record, and in the state that Prefect's server keeps."""
    store, secret = RunStore(tmp_path), "marked-0a1b2c3d"
    record = make_record()

    def start_to_end(*_):
        raise OSError(f"https://me:{secret}@proxy is away")

    store.create(record)
    monkeypatch.setenv("HTTPS_PROXY", f"https://me:{secret}@proxy")
    monkeypatch.setattr(train, "_run_services", start_to_end)
    with pytest.raises(RuntimeError, match=r"https://me:\*\*\*@proxy is away") as raised:
        train._run_and_record_end(store, record.run_id, 0)
    assert secret not in "".join(traceback.format_exception(raised.value))
    assert store.load(record.run_id).error == "OSError: https://me:***@proxy is away"


def test_an_end_without_a_server_is_judged_once(tmp_path, monkeypatch):
    """A model that could not be loaded is not healthy, and the record has the word at once."""
    store, judged = RunStore(tmp_path), []
    record = make_record(status="running")
    store.create(record)
    judge = run_health.judge_learning
    monkeypatch.setattr(
        run_health, "judge_learning", lambda *a, **b: judged.append(1) or judge(*a, **b)
    )
    attempts.record_end(store, record, ModelNotFoundError("there is no model m"))
    ended = store.load(record.run_id)
    assert (ended.status, ended.end_cause, ended.learning) == ("failed", "failed", "unknown")
    assert (ended.health or {})["final"] is True
    assert (ended.health or {})["evidence"][1] == "there is no model m"
    assert attempts.record_end(store, record, None) == ended, "an end is recorded once"
    Monitor(store).tick()
    assert refresh_health(store, ended).health == store.load(record.run_id).health
    assert judged == [1]


def created(store, **values):
    """A record of a run of one environment, and its folder."""
    file = store.home / "one.py"
    file.write_text("")
    return write_run(store, environment="one", environment_file=str(file), **values)


def test_a_validation_is_required_until_the_run_has_made_a_step(tmp_path):
    """A resume of a refused attempt is another one; a fork has a checkpoint from the start."""
    store = RunStore(tmp_path)
    record = created(store, attempt=2, require_validation=True, forked_from="89abcdef@4")
    folder = store.dir(record.run_id)
    (folder.checkpoints / "step-000000.json").write_text("{}")
    with pytest.raises(ValidationMissingError, match="it has never been validated"):
        train._require_validation(store, record)
    train._require_validation(store, record.model_copy(update={"require_validation": False}))
    folder.metrics.write_text('{"step": 1}\n')
    train._require_validation(store, record)


def test_an_attempt_without_its_validation_is_not_begun(tmp_path, monkeypatch):
    store, begun = RunStore(tmp_path), []
    record = created(store, require_validation=True, status="failed", started_at=now_iso())
    monkeypatch.setattr(train, "_run_services", lambda *_: begun.append(1))
    state = train._run_and_record_end(store, record.run_id, 0)
    assert state is not None
    assert (state.type, state.name) == ("FAILED", "Refused")
    assert "it has never been validated" in str(state.message)
    assert (begun, store.load(record.run_id).attempt) == ([], 2)


def test_the_record_is_read_twice_and_the_configuration_once_before_the_first_process(
    tmp_path, monkeypatch
):
    """Once to see whose flow run this is, and once to begin the attempt."""
    store = RunStore(tmp_path)
    record = created(store)
    num_reads = {"record": 0, "configuration": 0}
    load_record, load_config = RunStore.load, run_config.RunConfig.from_yaml
    reads_at_start: list[dict[str, int]] = []

    def count_record(self, run_id):
        num_reads["record"] += 1
        return load_record(self, run_id)

    def count_config(path):
        num_reads["configuration"] += 1
        return load_config(path)

    def stop_here(*_):
        reads_at_start.append(dict(num_reads))
        raise KeyError("the first service would start now")

    monkeypatch.setattr(RunStore, "load", count_record)
    monkeypatch.setattr(run_config.RunConfig, "from_yaml", count_config)
    monkeypatch.setattr(RunServices, "start", stop_here)
    monkeypatch.setattr("os.setpgid", lambda *_: None)
    monkeypatch.setenv("LACHESIS_HOME", str(tmp_path))
    with pytest.raises(KeyError, match="first service"):
        train.train.fn(run_id=record.run_id)
    assert reads_at_start == [{"record": 2, "configuration": 1}]


@pytest.mark.parametrize("profile", ["embedded", "custom"])
def test_a_resumed_run_waits_longer_than_the_services_before_it_need(
    tmp_path, monkeypatch, profile
):
    store, waits = RunStore(tmp_path), []
    record = created(store, profile=profile)

    def living(self, timeout_s=60.0):
        waits.append(timeout_s)
        raise KeyError("asked")

    monkeypatch.setattr(RunDir, "hold_alive_lock", living)
    monkeypatch.setattr("os.setpgid", lambda *_: None)
    monkeypatch.setenv("LACHESIS_HOME", str(tmp_path))
    with pytest.raises(KeyError, match="asked"):
        train.train.fn(run_id=record.run_id)
    folder = store.dir(record.run_id)
    plan = make_training_plan(record, folder, run_config.RunConfig.from_yaml(folder.config))
    killed_s = 5.0
    assert waits[0] > sum(spec.grace_s + killed_s for spec in plan.services)


class FakeServices:
    """Stand for the processes of a run: the trainer answers, and the environment may have ended."""

    def __init__(self, *, is_environment_running):
        self.is_environment_running = is_environment_running

    def is_running(self, _):
        return self.is_environment_running

    def call_unless_service_dies(self, call, default):
        return call()

    def collect_exit_codes(self):
        return {}


def watch(monkeypatch, reports, limits=None, *, is_environment_running=False, record=None):
    """Supervise a run whose trainer gives these reports, a minute apart; the last one stays."""
    clock = [0.0]
    substitute = SimpleNamespace(
        monotonic=lambda: clock[0], sleep=lambda _: clock.__setitem__(0, clock[0] + 60)
    )
    monkeypatch.setattr(training_run, "time", substitute)
    waiting = list(reports)
    monkeypatch.setattr(
        training_run,
        "fetch_trainer_health",
        lambda _: waiting.pop(0) if len(waiting) > 1 else waiting[0],
    )
    config = run_config.resolve_run_config("one", "embedded", {"limits": limits or {}}, model="m")
    run = TrainingRun.__new__(TrainingRun)
    run.plan = SimpleNamespace(config=config)  # type: ignore[assignment]
    run.record, run.run_id, run.spent = record or make_record(), "0123abcd", {}
    services = FakeServices(is_environment_running=is_environment_running)
    run.group = services  # type: ignore[assignment]
    run.env_ids, run.report = {"environment": 0}, lambda *_: None
    monkeypatch.setattr(run, "_check_run", lambda: None)
    return run._watch_training()


FINISHED = {"phase": "finished", "step": 9}


def test_a_long_step_after_the_last_rollout_ends_no_run(monkeypatch):
    """A step of a large model takes minutes, and batches may be queued after the last rollout."""
    training = {"step": 3, "waiting_for": "forward_backward"}
    assert watch(monkeypatch, [training] * 9 + [FINISHED])
    waiting = {"step": 3, "waiting_for": "rollouts"}
    assert watch(monkeypatch, [waiting] * 9 + [FINISHED], is_environment_running=True)
    with pytest.raises(
        StopRequested, match=r"its environments ended after 3 of \d+ steps"
    ) as ended:
        watch(monkeypatch, [training, waiting])
    assert ended.value.cause is EndCause.NO_MORE_ITEMS, "a run is completed with all steps only"


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        ({"max_tokens": 5000}, "budget: 6,000 of 5,000 tokens"),
        ({"max_hours": 0.5}, "budget: 1 of 0.5 hours"),
        ({"max_cost_usd": 0.01}, "budget: 0.02 of 0.01 US dollars"),
        ({"max_tokens": 7000, "max_hours": 5, "max_cost_usd": 1.0}, None),
    ],
)
def test_the_supervision_keeps_budgets(monkeypatch, limits, sentence):
    """Also while the trainer does not answer any more: what it has said last counts."""
    record = make_record(earlier_hours=1.0)
    reports = [{"step": 1, "spent": {"tokens": 6000.0, "cost_usd": 0.02}}, {}]
    if sentence is None:
        assert watch(monkeypatch, [*reports, FINISHED], limits, record=record)
        return
    with pytest.raises(StopRequested) as ended:
        watch(monkeypatch, reports, limits, record=record)
    assert (ended.value.cause, str(ended.value)) == (EndCause.BUDGET, sentence)
