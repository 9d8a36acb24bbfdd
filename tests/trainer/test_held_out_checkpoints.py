"""To which checkpoint a held-out result belongs, and which checkpoints are kept for it."""

from types import SimpleNamespace

from lachesis.checkpoints.manifests import Checkpoints, HeldOutResult, Manifest, find_best
from lachesis.runs.held_out_results import HeldOutPoint
from lachesis.trainer.checkpoint_saving import CheckpointManager
from lachesis.trainer.evaluation_schedule import EvaluationScheduler


class Policy:
    """As much of a policy as saves and deletes."""

    sampler = None

    async def save(self, name):
        return {"state": f"tinker://{name}-state", "sampler_weights": f"tinker://{name}-sampler"}

    async def delete(self, path):
        pass

    async def discard(self, paths, timeout_s=0.0):
        pass


def make_keeper(folder, *, keep=10):
    (folder / "checkpoints").mkdir(exist_ok=True)
    return CheckpointManager(
        Policy(), Checkpoints(folder / "checkpoints"), num_to_keep=keep, resume_checkpoint=None
    )  # type: ignore[arg-type]


def point(step, share):
    return HeldOutPoint(step=step, percent_correct=share, items=20)


def held_out(keeper):
    """The result of each checkpoint: the step that was evaluated and the share."""
    found = {one.step: one.held_out for one in keeper.checkpoints.list_intact()}
    return {step: (one.step, one.percent_correct) if one else None for step, one in found.items()}


async def test_a_result_goes_to_its_step_or_to_the_first_checkpoint_after_it(tmp_path):
    keeper = make_keeper(tmp_path)
    keeper.note_held_out(point(0, 0.1))
    await keeper.save(10)
    keeper.note_held_out(point(14, 0.3))
    keeper.note_held_out(point(18, 0.4))
    await keeper.save(20)
    await keeper.save(30)
    keeper.note_held_out(point(25, 0.5))
    keeper.note_held_out(point(30, 0.6))
    keeper.note_held_out(point(25, 0.5))
    assert held_out(keeper) == {10: None, 20: (18, 0.4), 30: (30, 0.6)}
    await keeper.save(40)
    assert held_out(keeper)[40] is None


async def test_the_best_checkpoint_is_the_one_with_the_best_held_out_result(tmp_path):
    """It stays beside the newest ones; where none was evaluated the reward decides, and of equal
    ones the newer one stays.
    """
    keeper = make_keeper(tmp_path, keep=1)
    for step, share, reward in ((10, 0.8, 0.1), (20, 0.8, 0.2), (30, 0.5, 0.9), (40, None, 0.95)):
        keeper.count_step(reward, [])
        await keeper.save(step)
        if share is not None:
            keeper.note_held_out(point(step, share))
    await keeper.save(50)
    assert list(held_out(keeper)) == [20, 50]
    manifests = [
        Manifest(step=step, state="s", sampler_weights="w", reward=reward)
        for step, reward in ((1, 0.5), (2, None), (3, 0.5))
    ]
    assert find_best(manifests) is manifests[2]
    assert find_best(manifests[1:2]) is None
    manifests[1].held_out = HeldOutResult(percent_correct=0.0, items=1, step=2)
    assert find_best(manifests) is manifests[1]


async def test_a_checkpoint_under_evaluation_is_not_deleted(tmp_path):
    """A result that comes after several newer checkpoints still finds it."""
    keeper = make_keeper(tmp_path, keep=1)
    keeper.get_evaluated_step = lambda: 8
    for step in (10, 20, 30):
        await keeper.save(step)
    assert list(held_out(keeper)) == [10, 30]
    keeper.note_held_out(point(8, 0.75))
    keeper.get_evaluated_step = lambda: None
    await keeper.save(40)
    assert held_out(keeper) == {10: (8, 0.75), 40: None}


async def test_a_disk_that_is_full_costs_the_result_and_not_the_run(tmp_path, monkeypatch, caplog):
    keeper = make_keeper(tmp_path)
    await keeper.save(10)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(
        "lachesis.base.files.os", SimpleNamespace(**{**vars(__import__("os")), "open": full})
    )
    keeper.note_held_out(point(10, 0.75))
    assert "the checkpoint of step 10 has no held-out result" in caplog.text


async def test_an_evaluation_that_ends_during_a_save_finds_its_checkpoint(tmp_path):
    """Its result is taken after the save, which would delete the checkpoint as the oldest one."""
    keeper, evaluations = make_keeper(tmp_path, keep=1), EvaluationScheduler(every_steps=10)
    keeper.get_evaluated_step = lambda: evaluations.step_awaited
    await keeper.save(10)
    evaluations.start_round_if_due(10, SimpleNamespace())  # type: ignore[arg-type]
    offer, save = await evaluations.wait_for_next(""), keeper.policy.save

    async def save_while_it_ends(name):
        evaluations.finish(offer["id"], {"metrics": {"eval/percent_correct": 0.75}, "items": 20})
        return await save(name)

    keeper.policy.save = save_while_it_ends  # type: ignore[method-assign]
    await keeper.save(20)
    keeper.note_held_out(evaluations.results.pop())
    assert held_out(keeper) == {10: (10, 0.75), 20: None}
