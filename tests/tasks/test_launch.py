"""How a run's flow reads and tells what ends it."""

from __future__ import annotations

import signal
import traceback
from pathlib import Path
from typing import Any

import pytest
from prefect.exceptions import TerminationSignal

from flows import launch
from lachesis.errors import ModelNotFoundError
from lachesis.runs import RunRecord, RunStore


def caught(*errors: BaseException) -> BaseException:
    """The last of errors, each raised while the one before was handled."""
    before: BaseException | None = None
    for error in errors:
        error.__context__ = before
        before = error
    assert before is not None
    return before


def test_a_signal_is_seen_behind_the_error_that_came_of_it() -> None:
    asked = TerminationSignal(signal.SIGTERM)
    assert launch.told_to_end(asked) is asked
    assert launch.told_to_end(caught(asked, ValueError("Task run is not set"), RuntimeError("left the task"))) is asked
    assert launch.told_to_end(caught(ValueError("of the run"), RuntimeError("left the task"))) is None


def test_a_failure_is_told_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the run's record, and in the state that Prefect's server keeps."""
    store, secret = RunStore(tmp_path), "marked-0a1b2c3d"
    record = RunRecord(run_id="0123abcd", environment="one", environment_file="one.py", profile="embedded", base_model="m",
                       total_steps=9, seed=0, wandb_project="p", wandb_run_name="n")  # fmt: skip

    def start_to_end(*_: object) -> str:
        raise OSError(f"https://me:{secret}@proxy is away")

    store.create(record)
    monkeypatch.setenv("HTTPS_PROXY", f"https://me:{secret}@proxy")
    monkeypatch.setattr(launch, "_start_to_end", start_to_end)
    with pytest.raises(RuntimeError, match=r"https://me:\*\*\*@proxy is away") as raised:
        launch._recorded(store, record.run_id, 0, again=False)
    assert secret not in "".join(traceback.format_exception(raised.value))
    assert store.load(record.run_id).error == "OSError: https://me:***@proxy is away"


@pytest.mark.parametrize("status", ["stopped", "failed"])
def test_an_end_without_a_server_is_judged(tmp_path: Path, status: Any) -> None:
    """A model that could not be loaded is not healthy, and the record has the word at once."""
    store = RunStore(tmp_path)
    record = RunRecord(
        run_id="0123abcd", environment="e", environment_file="e.py", profile="embedded", base_model="m", total_steps=9, seed=0,
        wandb_project="p", wandb_run_name="n", status="running",
    )  # fmt: skip
    store.create(record)
    launch._end(store, record.run_id, status, ModelNotFoundError("there is no model m"))
    ended = store.load(record.run_id)
    assert (ended.status, ended.learning) == (status, "unknown")
    assert (ended.health or {})["final"] is True
    assert status == "stopped" or (ended.health or {})["evidence"][1] == "there is no model m"
