"""A resumed environment goes on after the items that training has seen."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from atroposlib.envs.base import BaseEnv

from lachesis.environment_process.dataset_position import DatasetPosition, install_position_tracking


def environment(**more):
    """A class with the four methods that are watched; its items are 1, 2, 3 …, and each third gives
    no group.
    """

    class Env:
        save_checkpoint, load_checkpoint = BaseEnv.save_checkpoint, BaseEnv.load_checkpoint
        count = 0

        async def get_next_item(self):
            self.count += 1
            return self.count

        async def handle_env(self, item):
            if item % 3:
                await self._send_scored_data_to_api({"item": item})

        async def _send_scored_data_to_api(self, scored_data):
            pass

    for name, value in more.items():
        setattr(Env, name, value)
    return Env


def give(file, groups, items):
    """What an environment gives that starts after so many groups."""

    async def run():
        cls = environment()
        install_position_tracking(DatasetPosition(file, groups), cls)
        env, given = cls(), []
        for _ in range(items):
            given.append(await env.get_next_item())
            await env.handle_env(given[-1])
        return given

    return asyncio.run(run())


def test_items_that_training_has_seen_are_passed_over(tmp_path):
    file = tmp_path / "cursor.txt"
    assert give(file, 0, 8) == [1, 2, 3, 4, 5, 6, 7, 8]  # groups of 1 2 4 5 7 8
    assert give(file, 3, 4) == [5, 6, 7, 8], (
        "the third group was that of item 4; the groups after it were not trained on"
    )
    assert give(file, 5, 2) == [8, 9], "numbers go on over several attempts"
    assert give(file, 0, 2) == [1, 2], "a run without a checkpoint begins anew"


def test_groups_that_nobody_counted_do_no_harm(tmp_path):
    """The file was lost, or is shorter than what training has received."""
    assert give(tmp_path / "gone.txt", 7, 2) == [1, 2]
    give(tmp_path / "short.txt", 0, 2)
    assert give(tmp_path / "short.txt", 100, 1) == [3]


@pytest.mark.parametrize("content", [b"\xff" * 24, b"-3         \n", b"many\n"])
def test_a_damaged_cursor_begins_anew(tmp_path, content, caplog):
    (tmp_path / "cursor.txt").write_bytes(content)
    assert DatasetPosition(tmp_path / "cursor.txt", 2).items_to_skip == 0
    assert "is damaged" in caplog.text


def test_an_environment_with_its_own_checkpoints_gets_the_newest_before_the_step(tmp_path):
    """Atropos asks for the file of exactly that step, and begins without a word at the start when
    it is not there.
    """
    loaded: list[str] = []

    def load(self):
        loaded.append(
            (
                Path(self.checkpoint_dir)
                / "env_checkpoints"
                / self.wandb_prepend
                / f"step-{self.curr_step}.json"
            ).read_text()
        )

    folder = tmp_path / "env_checkpoints" / "e_0"
    folder.mkdir(parents=True)
    for step in (5, 10, 15):
        (folder / f"step-{step}.json").write_text(str(step))
    cls = environment(load_checkpoint=load)
    give(tmp_path / "cursor.txt", 0, 3)
    cursor = DatasetPosition(tmp_path / "cursor.txt", 2)
    install_position_tracking(cursor, cls)
    cls.load_checkpoint(SimpleNamespace(checkpoint_dir=tmp_path, wandb_prepend="e_0", curr_step=13))
    assert loaded == ["10"]
    assert asyncio.run(cls().get_next_item()) == 1, "nothing is passed over besides"


def test_an_environment_that_cannot_be_passed_over_goes_on(tmp_path, caplog):
    give(tmp_path / "cursor.txt", 0, 5)

    async def ends(self):
        self.count += 1
        if self.count == 2:
            raise RuntimeError("no more")
        return int(self.count)

    cls = environment(get_next_item=ends)
    install_position_tracking(DatasetPosition(tmp_path / "cursor.txt", 3), cls)
    assert asyncio.run(cls().get_next_item()) == 3
    assert (
        "not all of the 4 items that training has seen are passed over: RuntimeError('no more')"
        in caplog.text
    )


def test_an_environment_that_can_seek_is_told_the_number(tmp_path):
    give(tmp_path / "cursor.txt", 0, 8)
    asked: list[int] = []

    def save(self, step): ...

    def seek(self, items):
        asked.append(items)
        self.count = items

    cls = environment(seek=seek, save_checkpoint=save)
    install_position_tracking(DatasetPosition(tmp_path / "cursor.txt", 3), cls)
    assert asyncio.run(cls().get_next_item()) == 5
    assert asked == [4], "although it keeps checkpoints of its own, for Atropos alone"
