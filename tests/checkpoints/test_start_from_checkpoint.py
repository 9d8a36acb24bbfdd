"""A run may begin from a checkpoint of another one, if that is whole and its adapter fits."""

import pytest

from lachesis.base.errors import CheckpointError, ConfigError, RunStateError, UnknownRunError
from lachesis.checkpoints import start_from_checkpoint as forks
from lachesis.checkpoints.manifests import Checkpoints
from lachesis.config import run_config as run_config
from lachesis.runs.store import RunStore
from tests.checkpoints.test_manifests import save
from tests.harness.home import write_run

CONFIG = run_config.resolve_run_config("arithmetic", "embedded", {}, model="m")
RUN = "0123abcd"


@pytest.fixture
def store(tmp_path):
    """One run with checkpoints of the steps 4 and 8."""
    store = RunStore(tmp_path)
    folder = store.dir(write_run(store).run_id)
    for step in (4, 8):
        save(Checkpoints(folder.checkpoints), step)
    return store


@pytest.mark.parametrize(("named", "step"), [(RUN, 8), (f"{RUN}@4", 4)])
def test_the_fork_goes_on_from_a_copy_at_step_0(store, named, step):
    origin = forks.find_source(store, named)
    assert origin.name == f"{RUN}@{step}"
    fork = store.dir(write_run(store, run_id="4567abcd").run_id)
    origin.copy_into(fork)
    checkpoints = Checkpoints(fork.checkpoints)
    first = checkpoints.find_resumable()
    assert first is not None
    assert (first.step, first.groups, first.state) == (0, 0, f"tinker://r/weights/{step}")
    for later in (4, 8, 12, 16):
        save(checkpoints, later + 100)
    assert 0 not in [one.step for one in checkpoints.find_superseded(1)], "it is another run's"
    assert Checkpoints(store.dir(RUN).checkpoints).find_resumable() is not None


def test_what_cannot_be_begun_from_is_told(store):
    with pytest.raises(UnknownRunError):
        forks.find_source(store, "ffffffff")
    with pytest.raises(UnknownRunError):
        forks.find_source(store, "../../etc")
    with pytest.raises(
        RunStateError, match="no complete checkpoint '5'; allowed: best, last, 4, 8"
    ):
        forks.find_source(store, f"{RUN}@5")
    write_run(store, run_id="4567abcd")
    with pytest.raises(RunStateError, match="there is no checkpoint yet"):
        forks.find_source(store, "4567abcd")
    adapter = store.dir(RUN).engine / "r" / "weights" / "8" / "adapter_model.safetensors"
    adapter.write_bytes(b"x" * 100)
    with pytest.raises(
        CheckpointError,
        match=r"is damaged: engine/r/weights/8/adapter_model\.safetensors has changed",
    ):
        forks.find_source(store, f"{RUN}@8")
    assert forks.find_source(store, RUN).name == f"{RUN}@4"
    with pytest.raises(
        RunStateError,
        match="no checkpoint has a held-out result or a reward to choose by; allowed: last, 4, 8",
    ):
        forks.find_source(store, f"{RUN}@best")
    assert forks.find_source(store, f"{RUN}@last").name == f"{RUN}@4"


@pytest.mark.parametrize(
    ("profile", "changes", "said"),
    [
        ("tinker", {}, "profile embedded and this run tinker"),
        ("embedded", {"tinker": {"lora_rank": 8}}, "lora_rank 32 and this run 8"),
        (
            "embedded",
            {"openai": {"model_name": "other"}, "env": {"tokenizer_name": "other"}},
            "base model m and this run other; they must be equal, so leave it out",
        ),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(store, profile, changes, said):
    values = CONFIG.model_dump()
    for section, fields in changes.items():
        values[section].update(fields)
    with pytest.raises(ConfigError, match=said):
        forks.find_source(store, RUN).require_compatible(
            profile, run_config.build_run_config(values)
        )
