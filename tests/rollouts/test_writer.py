"""What the trainer keeps of each rollout: texts, outcome, reason, and what was refused."""

import json
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np

from lachesis.inference_server.token_usage import Usage
from lachesis.rollouts import writer as rollout_writer
from lachesis.rollouts.parquet_files import RolloutFolder
from lachesis.rollouts.search import RolloutQuery, find_rollouts
from lachesis.rollouts.writer import RolloutWriter, StepRollouts
from lachesis.trainer.batch.group_to_datums import Batch, BatchSettings, to_batch

TOKENIZER: Any = SimpleNamespace(
    decode=lambda tokens, skip_special_tokens: " ".join(map(str, tokens))
)
SETTINGS = BatchSettings(max_tokens=5, eos_id=None)


def make_group(*scores, answer=4, **changes):
    """Return a group of arrays, as the trainer reads it: a prompt of two tokens, then two more."""
    count = len(scores)
    return {
        "tokens": [np.array([2, 3, answer, 5])] * count,
        "masks": [np.array([-100, -100, answer, 5])] * count,
        "inference_logprobs": [np.array([1.0, 1.0, -0.5, -1.5])] * count,
        "scores": list(scores),
        **changes,
    }


def make_writer(folder, max_bytes=10**9):
    return RolloutWriter(RolloutFolder(folder, max_bytes), TOKENIZER, Usage(), environment="sums")


def read_rows(folder):
    return find_rollouts(folder, RolloutQuery(limit=1000, with_tokens=True)).rollouts


def test_a_rollout_is_kept_with_all_that_is_known_about_it(tmp_path):
    writer = make_writer(tmp_path)
    writer.usage.record_sequence([4, 5], [-0.5, -1.5], "stop", 7)
    groups = [
        make_group(
            1.0,
            0.0,
            overrides=[{"parts": {"form": 1}}, {"zero": "it is 4"}],
            group_overrides={"item": '{"question": "2+2="}', "environment": "other"},
        )
    ]
    writer.start(0)
    writer.add(StepRollouts(1, groups, to_batch(groups, SETTINGS)))
    writer.close()
    right, wrong = read_rows(tmp_path)
    assert right == {
        "step": 1,
        "group": 0,
        "rollout": 0,
        "environment": "other",
        "item_key": right["item_key"],
        "item": '{"question": "2+2="}',
        "prompt": "2 3",
        "answer": "4 5",
        "score": 1.0,
        "parts": {"form": 1.0},
        "advantage": 0.5,
        "outcome": "trained",
        "reason": None,
        "tokens": [2, 3, 4, 5],
        "sampled": [False, False, True, True],
        "logprobs": [None, None, -0.5, -1.5],
        "trained_logprobs": None,
        "weights_version": 7,
    }
    assert (wrong["score"], wrong["reason"], wrong["advantage"]) == (0.0, "it is 4", -0.5)
    assert len(right["item_key"]) == 8


def test_tokens_have_their_probability_in_training(tmp_path):
    """Also where a doubled end of a turn was left out of the training sequence."""
    writer = make_writer(tmp_path)
    doubled = {
        "tokens": [np.array([2, 3, 9, 9, 5])] * 2,
        "masks": [np.array([-100, -100, -100, 9, 5])] * 2,
        "inference_logprobs": [np.array([1.0, 1.0, 1.0, -0.5, -1.5])] * 2,
        "scores": [1.0, 0.0],
    }
    equal = make_group(1.0, 1.0)
    groups = [make_group(1.0, 0.0), equal, doubled]
    batch = to_batch(groups, BatchSettings(max_tokens=5, eos_id=9))
    batch.training_logprobs_D = [np.arange(len(datum.targets)) / -8 for datum in batch.datums]
    assert batch.datum_rollouts == [(0, 0), (0, 1), (2, 0), (2, 1)]
    writer.start(0)
    writer.add(StepRollouts(1, groups, batch))
    writer.close()
    kept = {(row["group"], row["rollout"]): row["trained_logprobs"] for row in read_rows(tmp_path)}
    assert kept[0, 0] == kept[0, 1] == [None, None, -0.125, -0.25]
    assert kept[1, 0] is None, "it was not trained on"
    num_targets = len(batch.datums[2].targets)
    last = -(num_targets - 1) / 8
    assert kept[2, 1][-2:] == [last + 0.125, last]


def test_what_was_not_trained_on_says_why(tmp_path):
    groups = [
        make_group(1.0, 1.0),
        make_group(1.0, 0.0, tokens=[np.arange(1, 9)] * 2, masks=[np.arange(1, 9)] * 2,
                   inference_logprobs=[np.full(8, -0.5)] * 2),
        make_group(1.0, 0.0, 0.5, masks=[np.array([-100] * 4), *[np.array([-100, -100, 4, 5])] * 2],
                   overrides=[{"invalid": "the verifier failed"}]),
        make_group(1.0, 0.0, inference_logprobs=None),
    ]  # fmt: skip
    writer = make_writer(tmp_path)
    writer.start(0)
    refused = [("no scores", {"tokens": [[1, 2]]}), ("not finite", "[NaN")]
    writer.add(StepRollouts(1, groups, to_batch(groups, SETTINGS), refused))
    writer.close()
    rows = read_rows(tmp_path)
    assert [(row["group"], row["outcome"]) for row in rows] == [
        *[(0, "no signal")] * 2,
        *[(1, "too long")] * 2,
        (2, "invalid"),
        *[(2, "trained")] * 2,
        *[(3, "dropped")] * 2,
        (4, "refused"),
        (5, "refused"),
    ]
    invalid = rows[4]
    assert (invalid["score"], invalid["reason"]) == (None, "the verifier failed")
    assert (invalid["prompt"], invalid["answer"]) == ("2 3", "4 5"), "although it has no mask"
    assert "no inference_logprobs" in rows[-3]["reason"]
    assert (rows[-3]["score"], rows[-3]["advantage"]) == (0.0, None)
    assert (json.loads(rows[-2]["answer"]), rows[-2]["reason"]) == (
        {"tokens": [[1, 2]]},
        "no scores",
    )
    assert "NaN" in rows[-1]["answer"]


def test_no_group_is_too_strange_to_be_kept(tmp_path):
    """Whatever an environment sends, the rollouts beside it are kept."""
    good = make_group(1.0, 0.0, group_overrides={"item": "half a character: \ud83d"})
    strange: list[Any] = [
        make_group(1.0, tokens=[["a", {}, None, 5]]),
        make_group(1.0, group_overrides=5),
        {"tokens": [[1.5]], "masks": [[{}]], "scores": [1]},
        [[[]]],
        None,
        "half a character: \ud83d",
        {"tokens": np.arange(3), "scores": {1: 2}},
    ]
    batch = Batch(drop_reasons=dict.fromkeys(range(1, len(strange) + 1), "why"))
    writer = make_writer(tmp_path)
    writer.start(0)
    writer.add(StepRollouts(1, [good, *strange], batch, [("why", group) for group in strange]))
    writer.add(StepRollouts(2, [make_group(1.0, 0.0, overrides=[{"invalid": True}])], Batch()))
    writer.close()
    rows = read_rows(tmp_path)
    assert [row["step"] for row in rows].count(2) == 2
    assert {row["group"] for row in rows if row["step"] == 1} == set(range(2 * len(strange) + 1))
    assert rows[-2]["reason"] == "True"


def test_a_resume_keeps_the_steps_of_its_checkpoint(tmp_path):
    groups = [make_group(1.0, 0.0)]
    for first_step, last_step in ((0, 6), (4, 8)):
        writer = make_writer(tmp_path)
        writer.start(first_step)
        for step in range(first_step + 1, last_step + 1):
            writer.add(StepRollouts(step, groups, to_batch(groups, SETTINGS)))
        writer.close()
    assert [row["step"] for row in read_rows(tmp_path)] == [s for s in range(1, 9) for _ in "12"]


def test_a_disk_that_fails_or_hangs_costs_rollouts_and_no_step(tmp_path, monkeypatch, caplog):
    released = threading.Event()

    def fail(*_):
        released.wait(30)
        raise OSError("no space left on device")

    monkeypatch.setattr(RolloutFolder, "append", fail)
    monkeypatch.setattr(rollout_writer, "MAX_WAITING_STEPS", 4)
    monkeypatch.setattr(rollout_writer, "MAX_WAITING_ROLLOUTS", 2)
    writer = make_writer(tmp_path)
    writer.start(0)
    groups = [make_group(1.0, 0.0)]
    for step in range(1, 12):
        writer.add(StepRollouts(step, groups, to_batch(groups, SETTINGS)))
    released.set()
    writer.close()
    assert writer.num_lost_steps >= 6
    assert "no space left on device" in caplog.text
    assert "the disk is too slow" in caplog.text


def test_a_run_that_keeps_none_writes_none(tmp_path):
    writer = make_writer(tmp_path / "rollouts", max_bytes=0)
    writer.start(0)
    groups = [make_group(1.0, 0.0)]
    writer.add(StepRollouts(1, groups, to_batch(groups, SETTINGS)))
    writer.close()
    assert not (tmp_path / "rollouts").exists()
