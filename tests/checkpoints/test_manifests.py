"""Which checkpoint is resumed, and which are deleted."""

import logging

import pytest

from lachesis.base.errors import CheckpointError, RunStateError, StorageError
from lachesis.checkpoints.manifests import Checkpoints, Manifest, find_best


@pytest.fixture
def checkpoints(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    return Checkpoints(tmp_path / "checkpoints")


def save(checkpoints, step, **about):
    """A checkpoint as the embedded engine and the trainer leave it; its adapter's file."""
    for kind in ("weights", "sampler_weights"):
        folder = checkpoints.folder.parent / "engine" / "r" / kind / str(step)
        folder.mkdir(parents=True)
        (folder / "adapter_model.safetensors").write_bytes(bytes([step % 256]) * 100)
    paths = {
        "state": f"tinker://r/weights/{step}",
        "sampler_weights": f"tinker://r/sampler_weights/{step}",
    }
    checkpoints.write(Manifest.model_validate({"step": step, **paths, **about}))
    return folder / "adapter_model.safetensors"


def resumed(checkpoints):
    found = checkpoints.find_resumable()
    return None if found is None else found.step


def test_the_newest_whole_one_is_resumed(checkpoints):
    assert checkpoints.find_newest() is None
    assert resumed(checkpoints) is None
    for step in (25, 100, 50):
        save(checkpoints, step)
    (checkpoints.folder / ".step-000200.json.77").write_text("{")  # a write that was cut off
    newest = checkpoints.find_newest()
    assert newest is not None
    assert (newest.step, newest.state) == (100, "tinker://r/weights/100")
    assert set(newest.files) == {
        f"engine/r/{kind}/100/adapter_model.safetensors" for kind in ("weights", "sampler_weights")
    }
    assert resumed(checkpoints) == 100


def test_damaged_ones_are_passed_over_with_a_warning(checkpoints, caplog):
    """A byte that has changed, a file that is shorter or gone, a manifest that is cut off."""
    caplog.set_level(logging.WARNING)
    files = {step: save(checkpoints, step) for step in (25, 50, 75, 100)}
    files[100].write_bytes(b"x" + files[100].read_bytes()[1:])
    assert resumed(checkpoints) == 75
    assert (
        "checkpoint of step 100 is damaged and skipped: engine/r/sampler_weights/100" in caplog.text
    )
    files[75].write_bytes(b"")
    assert resumed(checkpoints) == 50
    assert "has 0 bytes instead of 100" in caplog.text
    (checkpoints.folder / "step-000050.json").write_text('{"step": 50')
    newest = checkpoints.find_newest()
    assert newest is not None
    assert newest.step == 100, "hashes are looked at by a resume only"
    assert resumed(checkpoints) == 25
    files[25].unlink()
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in .* is complete .*step-000100\.json"
    ):
        checkpoints.find_resumable()


def test_what_is_damaged_does_not_supersede_what_comes_after_a_resume(checkpoints):
    """Whose size is right would count as the newest one, and have each new one deleted."""
    save(checkpoints, 10)
    for step in (20, 30):
        save(checkpoints, step).write_bytes(b"x" * 100)
    assert resumed(checkpoints) == 10
    checkpoints.set_aside(after=10)
    save(checkpoints, 12)
    assert [one.step for one in checkpoints.find_superseded(num_to_keep=1)] == [10]
    assert resumed(checkpoints) == 12
    assert len(list(checkpoints.folder.glob("*.damaged"))) == 2


def test_a_checkpoint_of_another_server_has_no_files_here(checkpoints):
    checkpoints.write(
        Manifest(
            step=1,
            state="tinker://cloud/weights/a",
            sampler_weights="tinker://cloud/sampler_weights/a",
        )
    )
    assert resumed(checkpoints) == 1


def test_the_last_ones_the_best_and_the_final_one_are_kept(checkpoints):
    for step, reward in ((1, 0.1), (2, 0.9), (3, 0.2), (4, 0.3)):
        save(checkpoints, step, reward=reward)
    assert [one.step for one in checkpoints.find_superseded(2)] == [1]
    assert [one.step for one in checkpoints.find_superseded(1)] == [1, 3]
    save(checkpoints, 5, reward=0.1, is_final=True)
    save(checkpoints, 6, reward=0.1)
    assert [one.step for one in checkpoints.find_superseded(1)] == [1, 3, 4]
    only = Checkpoints(checkpoints.folder.parent / "other" / "checkpoints")
    only.folder.mkdir(parents=True)
    save(only, 1)
    assert only.find_superseded(0) == [], "never the only one"


def test_steps_are_ordered_as_numbers(checkpoints):
    """As names, step-1000000 comes before step-999975."""
    steps = (999_950, 999_975, 1_000_000, 1_000_025)
    for step in steps:
        save(checkpoints, step)
    assert [one.step for one in checkpoints.list_intact()] == list(steps)
    assert resumed(checkpoints) == steps[-1]
    assert [one.step for one in checkpoints.find_superseded(1)] == list(steps[:-1])
    assert checkpoints.describe_skipped(checkpoints.select("999975")) == (
        "damaged and skipped: step-1000000, step-1000025; this is step 999975"
    )
    checkpoints.set_aside(after=999_975)
    assert resumed(checkpoints) == 999_975


def evaluated(step, percent_correct, reward=None):
    held_out = {"percent_correct": percent_correct, "items": 50, "step": step}
    values = {
        "step": step,
        "state": "s",
        "sampler_weights": "w",
        "held_out": held_out,
        "reward": reward,
    }
    return Manifest.model_validate(values)


def test_the_best_is_chosen_by_held_out_result_and_else_by_reward():
    rewarded = [
        Manifest(step=step, state="s", sampler_weights="w", reward=reward)
        for step, reward in ((1, 0.2), (2, 0.9))
    ]
    assert find_best(rewarded) is rewarded[1]
    measured = [evaluated(3, 0.5, 0.1), evaluated(4, 0.7, 0.2), evaluated(5, 0.6, 0.3)]
    assert find_best([*rewarded, *measured]) is measured[1], (
        "a held-out result counts more than any reward"
    )
    assert find_best([*measured, evaluated(6, 0.7)]) == evaluated(6, 0.7), (
        "of equal ones the newest"
    )
    diverged = Manifest(step=7, state="s", sampler_weights="w", reward=float("nan"))
    assert find_best([diverged, *rewarded]) is rewarded[1]
    assert find_best([diverged]) is None
    assert find_best([]) is None


def test_the_best_by_held_out_result_is_never_superseded(checkpoints):
    for step, percent_correct in ((1, 0.4), (2, 0.8), (3, 0.6), (4, 0.5), (5, 0.5)):
        held_out = {"percent_correct": percent_correct, "items": 50, "step": step}
        save(checkpoints, step, reward=1 / step, held_out=held_out)
    assert [one.step for one in checkpoints.find_superseded(1)] == [1, 3, 4]


def test_a_checkpoint_is_selected_by_word_or_step(checkpoints):
    with pytest.raises(RunStateError, match="there is no checkpoint yet"):
        checkpoints.select("last")
    with pytest.raises(
        RunStateError, match="no complete checkpoint '7'; allowed: best, last, none yet"
    ):
        checkpoints.select("7")
    files = {
        step: save(checkpoints, step, reward=reward)
        for step, reward in ((1, 0.1), (2, 0.9), (3, 0.2))
    }
    assert [checkpoints.select(which).step for which in ("last", "best", "1")] == [3, 2, 1]
    files[2].write_bytes(b"x" * 100)
    with pytest.raises(
        CheckpointError, match=r"checkpoint 2 is damaged: engine/r/sampler_weights/2/.* has changed"
    ):
        checkpoints.select("best")
    files[2].unlink()
    with pytest.raises(CheckpointError, match="checkpoint 2 is damaged; the log above"):
        checkpoints.select("2")
    assert checkpoints.select("best").step == 3, "the best of the whole ones"


def test_a_manifest_of_the_release_before_is_read(checkpoints):
    """It has no held-out result, and its parts have names without a suffix."""
    (checkpoints.folder / "step-000004.json").write_text(
        '{"step": 4, "state": "tinker://r/weights/step-000004-state", "sampler_weights": '
        '"tinker://r/sampler_weights/step-000004-sampler", "final": false, "borrowed": false, '
        '"groups": 8, "mixture": {}, '
        '"reward": 0.5, "probes": [], "files": {}, "created_at": '
        '"2026-01-01T00:00:00+00:00"}'
    )
    manifest = checkpoints.select("best")
    assert (manifest.step, manifest.held_out) == (4, None)


def test_a_disk_that_refuses_is_told(tmp_path):
    with pytest.raises(
        StorageError,
        match=r"step-000001\.json: No such file or directory; check the free space and the "
        "permissions",
    ):
        Checkpoints(tmp_path / "gone").write(Manifest(step=1, state="s", sampler_weights="w"))
