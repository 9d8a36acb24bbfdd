"""A run's record and its configuration become the services that it needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from lachesis import config as configuration
from lachesis.config import RunConfig
from lachesis.errors import ConfigError
from lachesis.runs import RunRecord, RunStore
from lachesis.supervision.plan import make_plan


def test_an_environment_that_was_written_into_the_configuration_by_hand_is_told(tmp_path: Path) -> None:
    """The record says which code the run began with; an environment that it does not know has none."""
    record = RunRecord(
        run_id="00000001", environment="replay", environment_file="replay.py", profile="embedded", base_model="m",
        total_steps=2, seed=0, wandb_project="p", wandb_run_name="n",
    )  # fmt: skip
    store = RunStore(tmp_path)

    def config(mixture: dict[str, dict[str, float]]) -> RunConfig:
        return configuration.resolve("replay", "embedded", {"env": {"mixture": mixture}}, model="m")

    assert make_plan(record, store.dir(record.run_id), config({})).environments == {"environment": "replay"}
    with pytest.raises(ConfigError, match=r"environments replay, other; allowed: .* began with \(replay\)"):
        make_plan(record, store.dir(record.run_id), config({"other": {"weight": 1.0}}))
