"""A run that costs money begins only after a yes, on every way to start one."""

import builtins
import io
from typing import Any

import pytest

from lachesis.base.errors import ConfirmationError
from lachesis.cli.main import main
from lachesis.config.launch_spec import LaunchSpec
from lachesis.config.prices import Prices
from lachesis.inference_tests.forecast import GroupUsage, PlannedRun, make_forecast, sum_groups
from lachesis.operations.launches import start_run
from lachesis.prefect_client import background_serve, submit
from lachesis.prefect_client.runs_from_prefect import find_or_create_run
from lachesis.runs.store import RunStore
from lachesis.spending import confirmation

MODEL = "Qwen/Qwen3-8B"
PLANNED = PlannedRun(
    total_steps=60,
    batch_size=64,
    group_size=16,
    base_model=MODEL,
    profile="tinker",
    evaluations=3,
    evaluation_answers=24,
    kept_checkpoints=4,
    checkpoint_gb=1.5,
)
GROUPS = [GroupUsage(rollouts=16, prefill=480, sampled=800, seconds=1)] * 4
PRICES = Prices(prefill=0.195, sample=0.6, train=0.44, dated="2026-10-07")


@pytest.fixture
def forecast():
    usage = sum_groups(GROUPS)
    assert usage is not None
    return make_forecast(usage, PLANNED, PRICES, storage_price=0.1).model_dump(mode="json")


@pytest.fixture
def started(random_model, monkeypatch):
    """The ids of runs that were handed to a server, which is not there."""
    ids: list[str] = []

    def submit_run(store, record):
        ids.append(record.run_id)
        return record

    monkeypatch.setattr(submit, "submit_run", submit_run)
    monkeypatch.setattr(background_serve, "read_key_names", lambda: {"TINKER_API_KEY": "set"})
    monkeypatch.setattr(background_serve, "require_server", lambda home: None)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    return ids


@pytest.fixture
def train(random_model):
    def call(*words):
        paid = ["--profile", "tinker", "--model", random_model, "--without-validation"]
        return main(["train", "arithmetic", *paid, *words])

    return call


def test_the_cost_is_told_with_all_its_parts(forecast):
    text = confirmation.describe_cost(forecast)
    assert text.startswith("60 steps of 64 rollouts take ")
    assert "for 3 held-out evaluations of 24 answers" in text
    assert "4 kept checkpoints of about 6 GB together, $0.60 a month" in text
    assert "based on 64 rollouts in 4 groups" in text
    assert "prices of 2026-10-07" in text
    assert "no test of this model and code" in confirmation.describe_cost(None)


def test_a_script_must_say_yes_or_a_limit(train, started, capsys):
    assert train("--json") == 1
    assert '"code": "confirmation"' in capsys.readouterr().out
    assert RunStore().all() == []
    prices = RunStore().home / "prices.yaml"
    assert train("--yes") == 0
    assert train("--set", "limits.max_tokens=1000", "--json") == 1, "tokens are no money"
    assert not prices.exists()
    assert len(started) == 1


def test_a_limit_counts_as_a_yes(train, started, random_model, clean_environment):
    table = f"models: {{{random_model}: {{prefill: 1, sample: 1, train: 1, dated: 2026-10-07}}}}"
    (clean_environment / "prices.yaml").write_text(table)
    assert train("--set", "max_cost_usd=2") == 0
    assert len(started) == 1


@pytest.mark.parametrize(("answer", "code", "count"), [("y", 0, 1), ("", 1, 0), ("no", 1, 0)])
def test_a_person_is_asked(train, started, monkeypatch, capsys, answer, code, count):
    prompts: list[str] = []

    def ask(prompt):
        prompts.append(prompt)
        return answer

    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", terminal)
    monkeypatch.setattr(builtins, "input", ask)
    assert train() == code
    assert prompts == ["Start this run? [y/N] "]
    assert len(started) == count
    shown = capsys.readouterr()
    assert "there is no forecast" in shown.out + shown.err


def test_a_free_run_is_not_asked_about(started):
    assert main(["train", "arithmetic", "--steps", "3"]) == 0
    assert len(started) == 1


def test_prefect_asks_by_a_parameter(started, random_model):
    store = RunStore()
    values: dict[str, Any] = {
        "environment": "arithmetic",
        "profile": "tinker",
        "model": random_model,
        "without_validation": True,
    }
    with pytest.raises(ConfirmationError, match="`confirmed` in Prefect"):
        find_or_create_run(store, values, None)
    assert find_or_create_run(store, {**values, "confirmed": True}, None).profile == "tinker"


def test_a_program_is_refused_too(started, random_model):
    spec = LaunchSpec(
        environment="arithmetic", profile="tinker", model=random_model, without_validation=True
    )
    with pytest.raises(ConfirmationError, match="nobody has agreed to it"):
        start_run(RunStore(), spec)
    assert started == []


@pytest.mark.parametrize(
    ("fields", "prices", "is_asked"),
    [
        ({}, "", True),
        ({"backend": "http://10.0.0.7:8000"}, "", True),
        ({"tinker.backend": "skyrl"}, "", False),
        ({"tinker.backend": "skyrl"}, "backends: {skyrl: 2.0}", True),
        ({"backend": "skyrl", "max_cost_usd": 5}, "backends: {skyrl: 2.0}", False),
    ],
)
def test_an_engine_that_is_started_here_costs_nothing_unless_it_has_a_price(
    fields, prices, is_asked, clean_environment
):
    (clean_environment / "prices.yaml").write_text(prices)
    assert confirmation.needs_confirmation("custom", fields) is is_asked
