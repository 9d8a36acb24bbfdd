"""What the SDK waits out is told, and what waiting does not help against ends the run."""

import asyncio
import importlib.metadata
import json
from datetime import UTC, datetime

import pytest
import tinker

from lachesis.base.errors import BillingError, MissingKeyError, ModelNotFoundError, SessionLostError
from lachesis.base.tinker_client import call_sdk
from lachesis.checkpoints.manifests import Checkpoints
from lachesis.config import run_config
from lachesis.trainer import sdk_listener, tinker_outages
from lachesis.trainer.checkpoint_saving import CheckpointManager
from lachesis.trainer.tinker_outages import ServerWatch
from lachesis.trainer.trained_model import Policy
from tests.harness.sdk_versions import needs_sdk
from tests.tinker_cloud.conftest import cloud, served_cloud  # noqa: F401

MODEL = "Qwen/Qwen3-4B-Instruct-2507"


async def make_policy(watch):
    config = run_config.resolve_run_config("countdown", "tinker", {}, model=MODEL)
    policy = await Policy.create(config, resume_from=None, watch=watch)
    await policy.publish()
    return policy


async def sample(policy):
    assert policy.sampler is not None
    params = tinker.SamplingParams(max_tokens=2, seed=1)
    prompt = tinker.ModelInput.from_ints([64, 65])
    await call_sdk(policy.sampler, "sample", prompt, 1, params)


async def work_on(policy):
    """Sample again and again, as environments do."""
    while True:
        try:
            await sample(policy)
        except (tinker.TinkerError, ValueError) as error:
            assert policy.watch is not None
            policy.watch.report_exception(error)
        await asyncio.sleep(0.05)


@needs_sdk("0.38", "the parts that were listened to")
def test_the_listener_was_written_for_this_sdk():
    assert importlib.metadata.version("tinker") == sdk_listener.TINKER_VERSION


@pytest.mark.parametrize("kind", ["rate_limit", "server_error", "cut", "lost"])
async def test_what_passes_is_told_while_it_lasts(
    cloud,  # noqa: F811
    tmp_path,
    monkeypatch,
    kind,
):
    watch = ServerWatch(tmp_path / "pause.json")
    policy = await make_policy(watch)
    assert watch.get_pause() is None
    cloud.begin(kind, calls="optim_step|forward_backward|retrieve_future", count=3)
    await policy.compute_logprobs([64, 65, 66])
    await asyncio.sleep(0.1)
    pause = watch.get_pause()
    assert pause is not None
    assert ("HTTP" in pause["reason"]) == (kind in ("rate_limit", "server_error"))
    assert json.loads((tmp_path / "pause.json").read_text())["refusals"] >= 1
    monkeypatch.setattr(tinker_outages, "QUIET_S", 0.0)
    assert watch.get_pause() is None, "it is over when nothing was refused for a while"
    cloud.lift()
    await policy.close("success")


@pytest.mark.parametrize(
    ("kind", "error_class", "words"),
    [
        ("unpaid", BillingError, "add credit to the account of the key, then go on with `lachesis"),
        ("revoked", MissingKeyError, "set a valid key, restart `lachesis serve`"),
        ("session_expired", SessionLostError, "`lachesis resume RUN` goes on from the last one"),
    ],
)
async def test_what_does_not_pass_ends_the_run_within_seconds(
    cloud,  # noqa: F811
    kind,
    error_class,
    words,
):
    watch = ServerWatch()
    policy = await make_policy(watch)
    cloud.begin(kind)
    async with asyncio.timeout(20):
        with pytest.raises(error_class, match=words):
            await watch.run_unless_failed(work_on(policy))
    cloud.lift()
    await policy.close("errored")


@pytest.mark.parametrize("kind", ["unpaid", "revoked"])
async def test_a_run_that_cannot_begin_says_why(
    cloud,  # noqa: F811
    kind,
):
    watch = ServerWatch()
    cloud.begin(kind, calls=".*")
    async with asyncio.timeout(30):
        with pytest.raises((BillingError, MissingKeyError), match=r"HTTP 40[12]"):
            await watch.run_unless_failed(make_policy(watch))


async def test_a_model_that_was_retired_since_the_check_is_named(
    cloud,  # noqa: F811
):
    cloud.begin("model_retired", model=MODEL)
    with pytest.raises(ModelNotFoundError, match=f"does not train {MODEL} .*lachesis model list"):
        await make_policy(ServerWatch())


async def test_other_errors_stay_as_they_are():
    async def fail():
        raise ZeroDivisionError("of the trainer itself")

    with pytest.raises(ZeroDivisionError):
        await ServerWatch().run_unless_failed(fail())


async def test_a_time_to_live_is_renewed_and_recorded(
    cloud,  # noqa: F811
    tmp_path,
):
    cloud.begin("time_to_live", seconds=3600)
    policy = await make_policy(ServerWatch())
    manager = CheckpointManager(
        policy, Checkpoints(tmp_path / "checkpoints"), num_to_keep=3, resume_checkpoint=None
    )
    await manager.save(1)
    (manifest,) = manager.checkpoints.list_intact()
    assert manifest.expires_at is not None
    days = (datetime.fromisoformat(manifest.expires_at) - datetime.now(UTC)).days
    assert days in (29, 30), "the server would have deleted it after an hour"
    cloud.lift()
    await manager.save(2)
    assert manager.checkpoints.list_intact()[-1].expires_at is None, "it is kept"
    await policy.close("success")
