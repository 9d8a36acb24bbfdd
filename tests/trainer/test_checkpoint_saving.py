"""A checkpoint is written as a whole, and a try that failed does not stand in the way of the next
one.
"""

import pytest
import tinker

from lachesis.base.errors import StorageError
from lachesis.checkpoints.manifests import Checkpoints
from lachesis.trainer.checkpoint_saving import CheckpointManager
from lachesis.trainer.trained_model import Policy


@pytest.fixture
def keeper(policy, tmp_path):
    return CheckpointManager(
        policy, Checkpoints(tmp_path / "checkpoints"), num_to_keep=2, resume_checkpoint=None
    )


def run_folder(engine, policy):
    """The folder in which the engine keeps what this policy saves."""
    return engine.store / policy.training_client.model_id


def saved_names(folder):
    return sorted(
        f"{file.parts[-3]}/{file.parts[-2]}" for file in folder.glob("*/*/checkpoint.json")
    )


@pytest.mark.parametrize(
    ("refused", "other"), [("weights", "sampler_weights"), ("sampler_weights", "weights")]
)
async def test_a_save_that_failed_half_way_is_repeated(keeper, policy, engine, refused, other):
    """The server wrote one of the two parts. That one is deleted, and the next try succeeds."""
    folder = run_folder(engine, policy)
    folder.mkdir(exist_ok=True)
    obstacle = folder / refused
    obstacle.write_text("a file where the engine needs a folder")
    with pytest.raises(tinker.TinkerError, match="could not be written"):
        await keeper.save(3)
    assert saved_names(folder) == [], f"{other} of the failed try is left"
    obstacle.unlink()
    await keeper.save(3)
    manifest = keeper.checkpoints.find_newest()
    assert manifest is not None
    assert manifest.step == keeper.step == 3
    assert len(saved_names(folder)) == 2


async def test_a_save_whose_manifest_could_not_be_written_is_repeated(keeper, policy, engine):
    """The server has both parts of the step already, under names that it refuses to give twice."""
    aside = keeper.checkpoints.folder.with_name("aside")
    keeper.checkpoints.folder.rename(aside)
    with pytest.raises(StorageError):
        await keeper.save(3)
    aside.rename(keeper.checkpoints.folder)
    assert saved_names(run_folder(engine, policy)) == []
    await keeper.save(3)
    manifest = keeper.checkpoints.find_newest()
    assert manifest is not None
    resumed = await Policy.create(policy.config, resume_from=manifest.state)
    await resumed.close("success")


async def test_names_that_exist_on_the_server_do_not_matter(keeper, policy):
    """A try whose answer was lost leaves parts that nobody knows of."""
    await CheckpointManager(
        policy,
        Checkpoints(keeper.checkpoints.folder.with_name("lost")),
        num_to_keep=2,
        resume_checkpoint=None,
    ).save(3)
    await keeper.save(3)
    assert keeper.step == 3
