"""Files of release 0.1.0 are read, whose keys had other names; docs/upgrading.md lists them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import BaseModel

from lachesis.agent import session_store
from lachesis.monitor import monitor_memory, trend
from lachesis.runs import budgets, checkpoints, environment_counts, run_record
from lachesis.runs.run_dir import RunDir

UPGRADING = Path(__file__).parents[2] / "docs" / "upgrading.md"

RENAMED = {
    "run.json": run_record.RENAMED_KEYS,
    "monitor.json": {**monitor_memory.RENAMED_KEYS, **trend.RENAMED_KEYS},
    "checkpoints/step-*.json": checkpoints.RENAMED_KEYS,
    "environment*.json": environment_counts.RENAMED_KEYS,
}


@pytest.mark.parametrize("file", RENAMED)
def test_every_renamed_key_is_documented(file: str) -> None:
    rows = UPGRADING.read_text()
    for old_name, new_name in RENAMED[file].items():
        assert f"| `{file}` | `{old_name}` | `{new_name}` |" in rows


RECORD = {
    "run_id": "0123abcd",
    "environment": "arithmetic",
    "environment_file": "arithmetic.py",
    "profile": "embedded",
    "base_model": "m",
    "total_steps": 5,
    "seed": 1,
    "wandb_project": "p",
    "wandb_run_name": "n",
}


TABLES: dict[type[BaseModel], dict[str, str]] = {
    run_record.RunRecord: run_record.RENAMED_KEYS,
    monitor_memory.MonitorMemory: monitor_memory.RENAMED_KEYS,
    trend.Trend: trend.RENAMED_KEYS,
    checkpoints.Manifest: checkpoints.RENAMED_KEYS,
}


@pytest.mark.parametrize(
    ("model", "fields", "renamed"),
    [
        (
            run_record.RunRecord,
            RECORD,
            {
                "took_s": 1.5,
                "began_s": 2.5,
                "boot": "a",
                "resume_wanted": True,
                "mixture": {"b": {"environment_file": "b.py", "fingerprint": "f"}},
            },
        ),
        (
            monitor_memory.MonitorMemory,
            {},
            {
                "stalled": "trainer",
                "judged": "broken",
                "held_since": 1.0,
                "ahead_s": 2.0,
                "set_at": 3.0,
                "boot": "a",
                "final": True,
            },
        ),
        (
            trend.Trend,
            {"position": 900},
            {
                "first": [0.5],
                "recent": [0.25],
                "noise": 0.125,
                "parts": 7,
                "last_part": 0.75,
                "silent_steps": 3,
                "silent_rollouts": 24,
            },
        ),
        (
            checkpoints.Manifest,
            {"step": 4, "state": "s", "sampler_weights": "w"},
            {"final": True, "borrowed": True, "mixture": {"a": 3}},
        ),
    ],
)
def test_a_model_reads_the_old_names(
    model: type[BaseModel], fields: dict[str, object], renamed: dict[str, object]
) -> None:
    table = TABLES[model]
    read = model.model_validate_json(json.dumps({**fields, **renamed})).model_dump(mode="json")
    assert {old_name: read[table[old_name]] for old_name in renamed} == renamed
    assert not read.keys() & renamed.keys(), "the old names are not written again"
    assert model.model_validate(read).model_dump(mode="json") == read


def test_the_counts_of_an_environment_that_an_old_release_started(tmp_path: Path) -> None:
    file = tmp_path / "environment.json"
    old_counts = {"at": 5.0, "group_at": 4.0, "raised": 3, "invalid": 2, "zeros": {"late": 1}}
    file.write_text(json.dumps({**old_counts, "pid": 1, "groups": 9}))
    counts = environment_counts.read_counts(file, since=5.0)
    new_names = environment_counts.RENAMED_KEYS
    assert counts == {
        "pid": 1,
        "groups": 9,
        **{new_names[name]: value for name, value in old_counts.items()},
    }
    assert environment_counts.read_counts(file, since=6.0) is None


def test_the_cost_of_an_old_attempt_is_not_forgotten(tmp_path: Path) -> None:
    file = tmp_path / "spent.json"
    file.write_text('{"prefill": 1, "sampled": 2, "trained": 3, "cost": 4.5}')
    assert budgets.read_spent_file(file)["cost_usd"] == 4.5


def test_the_state_of_an_old_session() -> None:
    draft = {"environment": "arithmetic", "profile": "embedded"}
    state = session_store.SessionState.model_validate_json(
        json.dumps(
            {
                "starts": [{"run_id": "0123abcd", "draft": draft, "at": 7.0}],
                "checks": {"0123abcd": {"at": 8.0, "report": {"status": "running"}}},
                "test": {"asked": {"num_steps": 3}, "test_id": "4567abcd"},
            }
        )
    )
    assert state.starts[0].started_at == 7.0
    assert state.last_reports["0123abcd"].reported_at == 8.0
    assert state.test is not None
    assert state.test.request == {"num_steps": 3}


def test_a_run_goes_on_with_the_position_file_that_it_has(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, "0123abcd")
    run_dir.path.mkdir()
    assert run_dir.get_position_file("environment-2").name == "position-2.txt"
    (run_dir.path / "cursor-2.txt").write_text("1\n")
    assert run_dir.get_position_file("environment-2").name == "cursor-2.txt"
    assert run_dir.get_position_file("environment").name == "position.txt"
