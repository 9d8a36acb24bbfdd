"""Groups of rollouts: which questions find which of them."""

import pytest

from lachesis.base.errors import StorageError
from lachesis.rollouts.groups import GroupQuery, read_group, read_group_table
from lachesis.rollouts.parquet_files import RolloutFolder
from tests.harness.home import make_row


def make_group(step, group, scores, **changes):
    return [
        make_row(step, group, place, 0.0) | {"score": score, "answer": f"it is {score}", **changes}
        for place, score in enumerate(scores)
    ]


@pytest.fixture
def folder(tmp_path):
    """Groups of three steps: mixed, all wrong, all right, and one that could not be scored."""
    rollouts = RolloutFolder(tmp_path / "rollouts", 10**9)
    mixed = make_group(1, 0, [1.0, 0.0, 0.5])
    rollouts.append(mixed + make_group(1, 1, [0.0, 0.0], outcome="no signal", reason="no number"))
    rollouts.append(make_group(2, 0, [1.0, 1.0], outcome="no signal", environment="words"))
    rollouts.append(make_group(3, 2, [None, None], outcome="invalid", reason="it raised"))
    return rollouts.path


def find(folder, text="", **query):
    groups, num_matching = read_group_table(folder, text).find(GroupQuery(**query))
    assert num_matching >= len(groups)
    return [(group.step, group.group) for group in groups]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, [(3, 2), (2, 0), (1, 0), (1, 1)]),
        ({"order": "oldest"}, [(1, 0), (1, 1), (2, 0), (3, 2)]),
        ({"order": "worst", "ask": "wrong"}, [(1, 1), (1, 0)]),
        ({"ask": "all_wrong"}, [(1, 1)]),
        ({"ask": "all_right"}, [(2, 0)]),
        ({"ask": "silent"}, [(2, 0), (1, 1)]),
        ({"ask": "unscored"}, [(3, 2)]),
        ({"ask": "repeated"}, [(2, 0), (1, 0)]),
        ({"first_step": 2, "last_step": 2}, [(2, 0)]),
        ({"reason": "no number"}, [(1, 1)]),
        ({"environment": "words"}, [(2, 0)]),
        ({"item": "key0", "order": "oldest"}, [(1, 0), (2, 0)]),
        ({"text": "IT IS 0.5"}, [(1, 0)]),
        ({"text": "2+1="}, [(3, 2)]),
        ({"text": ".*"}, []),
        ({"first": 1, "limit": 2}, [(2, 0), (1, 0)]),
    ],
)
def test_a_query_finds(folder, query, expected):
    assert find(folder, **query) == expected


def test_a_group_has_its_scores(folder):
    table = read_group_table(folder)
    groups, _ = table.find(GroupQuery(order="oldest"))
    assert groups[0].scores == [0.0, 0.5, 1.0]
    assert (groups[0].num_right, groups[0].num_rollouts, groups[0].mean) == (2, 3, 0.5)
    assert (groups[3].scores, groups[3].num_rollouts, groups[3].mean) == ([], 2, None)
    assert table.list_values("reason") == ["it raised", "no number"]
    assert table.list_values("environment") == ["sums", "words"]
    assert table.count("wrong", GroupQuery(last_step=1)) == 2
    assert [row["rollout"] for row in read_group(folder, 1, 0)] == [0, 1, 2]
    assert read_group(folder, 9, 0) == []


def test_a_run_without_rollouts_has_no_groups(tmp_path):
    table = read_group_table(tmp_path / "missing", "text")
    assert table.find(GroupQuery(ask="wrong", reason="r", item="i")) == ([], 0)
    assert table.num_groups == 0


def test_a_damaged_file_is_told(folder):
    (folder / "steps-00000004-00000004.parquet").write_bytes(b"nothing")
    with pytest.raises(StorageError, match="cannot be read"):
        read_group_table(folder)
    with pytest.raises(StorageError, match="cannot be read"):
        read_group(folder, 4, 0)
