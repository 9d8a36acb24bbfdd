"""The rollouts of a run in Parquet: written, merged, deleted, discarded by a resume, and found."""

import os
from pathlib import Path

import pytest

from lachesis.base.errors import ConfigError, StorageError
from lachesis.rollouts import parquet_files
from lachesis.rollouts.parquet_files import COLUMNS, RolloutFolder, list_rollout_files, make_schema
from lachesis.rollouts.search import RolloutQuery, find_rollouts
from tests.harness.home import make_row

GIGABYTE = 10**9


def write_steps(folder, steps):
    """Write two groups of two rollouts per step, one file per step."""
    for step in steps:
        folder.append(
            [
                make_row(step, group, rollout, score=step / 100 + group / 10 + rollout / 2)
                for group in range(2)
                for rollout in range(2)
            ]
        )


def test_every_column_is_described_and_comes_back_as_it_was_written(tmp_path):
    assert list(COLUMNS) == make_schema().names
    folder = RolloutFolder(tmp_path / "rollouts", GIGABYTE)
    row = make_row(1, 0, 0, 0.25, reason="wrong", answer="käse \u2028 \0")
    folder.append([row])
    (found,) = find_rollouts(folder.path, RolloutQuery(with_tokens=True)).rollouts
    assert found == {**row, "parts": {"form": 0.125}}
    (found,) = find_rollouts(folder.path, RolloutQuery()).rollouts
    assert "tokens" not in found
    assert oct((tmp_path / "rollouts").stat().st_mode)[-3:] == "700"


@pytest.mark.parametrize(
    ("query", "expected", "num_matching"),
    [
        (RolloutQuery(order="worst", limit=2), [(1, 0, 0), (2, 0, 0)], 80),
        (RolloutQuery(order="best", limit=2), [(20, 1, 1), (19, 1, 1)], 80),
        (RolloutQuery(step=-1, limit=2), [(20, 0, 0), (20, 0, 1)], 4),
        (RolloutQuery(step=7, order="best", limit=1), [(7, 1, 1)], 4),
        (RolloutQuery(item="key1", limit=1), [(1, 1, 0)], 40),
        (RolloutQuery(item="0+1", step=3, limit=5), [(3, 0, 0), (3, 0, 1)], 2),
        (RolloutQuery(item="[", limit=5), [], 0),
        (RolloutQuery(invalid=True), [], 0),
    ],
)
def test_rollouts_are_found(tmp_path, query, expected, num_matching):
    folder = RolloutFolder(tmp_path, GIGABYTE)
    write_steps(folder, range(1, 21))
    found = find_rollouts(tmp_path, query)
    places = [(row["step"], row["group"], row["rollout"]) for row in found.rollouts]
    assert (places, found.num_matching) == (expected, num_matching)
    assert (found.first_step, found.last_step) == (1, 20)


def test_rollouts_without_a_score_are_neither_best_nor_worst(tmp_path):
    folder = RolloutFolder(tmp_path, GIGABYTE)
    rows = [
        make_row(1, 0, 0, 0.5, outcome="no signal"),
        {**make_row(1, 0, 1, 0.0, outcome="invalid"), "score": None},
        make_row(1, 1, 0, 9.0, outcome="dropped"),
        {"step": 1, "group": 2, "rollout": 0, "outcome": "refused", "reason": "no scores"},
    ]
    folder.append(rows)
    for order in ("worst", "best"):
        found = find_rollouts(tmp_path, RolloutQuery(order=order))
        assert [row["outcome"] for row in found.rollouts] == ["no signal"]
    found = find_rollouts(tmp_path, RolloutQuery(invalid=True))
    assert [row["outcome"] for row in found.rollouts] == ["invalid", "dropped", "refused"]
    assert found.rollouts[-1]["reason"] == "no scores"


def test_small_files_are_merged_and_nothing_is_lost(tmp_path):
    folder = RolloutFolder(tmp_path, GIGABYTE)
    write_steps(folder, range(1, 41))
    assert len(list(tmp_path.iterdir())) < parquet_files.MERGED_FILES
    found = find_rollouts(tmp_path, RolloutQuery(limit=1000))
    assert [row["step"] for row in found.rollouts] == [
        step for step in range(1, 41) for _ in "1234"
    ]


def test_an_interrupted_merge_shows_no_rollout_twice(tmp_path, monkeypatch):
    folder = RolloutFolder(tmp_path, GIGABYTE)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_: None)
        write_steps(folder, range(1, 17))
    assert len(list(tmp_path.iterdir())) == 17
    assert find_rollouts(tmp_path, RolloutQuery()).num_matching == 64
    folder.discard_after(16)
    assert len(list(tmp_path.iterdir())) == 1
    assert find_rollouts(tmp_path, RolloutQuery()).num_matching == 64


def test_the_oldest_are_deleted_and_counted(tmp_path):
    write_steps(RolloutFolder(tmp_path, GIGABYTE), range(1, 3))
    size = max(file.stat().st_size for file in tmp_path.iterdir())
    write_steps(RolloutFolder(tmp_path, 5 * size), range(3, 21))
    found = find_rollouts(tmp_path, RolloutQuery(limit=1000))
    assert found.num_deleted + found.num_matching == 80
    assert found.first_step is not None
    assert 14 < found.first_step < 20
    assert sum(file.path.stat().st_size for file in list_rollout_files(tmp_path)) <= 5 * size


def test_a_resume_makes_the_later_steps_again(tmp_path):
    folder = RolloutFolder(tmp_path, GIGABYTE)
    folder.append([make_row(step, 0, 0, 0.5) for step in range(1, 11)])
    folder.append([make_row(step, 0, 0, 0.5) for step in range(11, 15)])
    folder.discard_after(7)
    found = find_rollouts(tmp_path, RolloutQuery(limit=100))
    assert [row["step"] for row in found.rollouts] == list(range(1, 8))
    folder.discard_after(0)
    assert find_rollouts(tmp_path, RolloutQuery()).rollouts == []


def test_what_cannot_be_answered_is_refused(tmp_path):
    assert find_rollouts(tmp_path / "none", RolloutQuery(step=3)).rollouts == []
    write_steps(RolloutFolder(tmp_path, GIGABYTE), range(4, 6))
    with pytest.raises(ConfigError, match="step 3 were asked for; kept are those of steps 4 to 5"):
        find_rollouts(tmp_path, RolloutQuery(step=3))
    with pytest.raises(ConfigError, match="0 rollouts were asked for; allowed: 1 to 1000"):
        find_rollouts(tmp_path, RolloutQuery(limit=0))
    (file, _) = list_rollout_files(tmp_path)
    os.truncate(file.path, 100)
    with pytest.raises(StorageError, match="cannot be read"):
        find_rollouts(tmp_path, RolloutQuery())
