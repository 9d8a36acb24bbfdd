"""What a step is told to have taken: tokens, money, staleness; and whether the weights move, on a
real engine.
"""

import contextlib
import json

import numpy as np
import pytest

from lachesis.config import run_config as run_config
from lachesis.config.prices import Prices
from lachesis.config.run_fields import LimitsSection
from lachesis.inference_server.token_usage import Usage
from lachesis.runs.folder import RunDir
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.record import RunRecord
from lachesis.spending import budgets
from lachesis.trainer.batch.group_to_datums import BatchSettings, to_batch
from lachesis.trainer.loss_metrics import compute_rollout_metrics
from lachesis.trainer.step_accounting import StepAccounting
from lachesis.trainer.trained_model import Policy
from lachesis.trainer.trainer_state import TrainerState
from lachesis.weight_agreement.at_weight_sync import WeightSyncCheck


def group(tokens, logprobs, score=1.0):
    """One rollout: a prompt of two tokens, then `tokens`."""
    whole, masks = [7, 8, *tokens], [-100, -100, *tokens]
    return {
        "tokens": [whole],
        "masks": [masks],
        "inference_logprobs": [[1.0, 1.0, *logprobs]],
        "scores": [score],
    }


def test_answers_that_begin_alike_are_told_apart():
    """By all of their tokens: their beginnings, in both tokens and log-probabilities, are the same
    for many tokens.
    """
    usage, begin, logprobs = Usage(), list(range(3, 40)), [-0.5] * 37
    usage.record_sequence([*begin, 50], [*logprobs, -1.0], "length", 0)
    usage.version = 3
    usage.record_sequence([*begin, 51], [*logprobs, -1.0], "stop", 3)
    assert usage.was_truncated([*begin, 50], [*logprobs, -1.0])
    assert not usage.was_truncated([*begin, 51], [*logprobs, -1.0])
    assert not usage.was_truncated([*begin, 52], [*logprobs, -1.0])
    assert [usage.find_staleness([*begin, end], [*logprobs, -1.0]) for end in (50, 51, 52)] == [
        3,
        0,
        None,
    ]


def test_the_entropy_is_of_tokens_that_were_sampled():
    """Neither the first token, which nothing predicts, nor a sentinel where a log-probability is
    missing.
    """
    whole = {
        "tokens": [[7, 8, 9]],
        "masks": [[7, 8, 9]],
        "inference_logprobs": [[1.0, -0.5, 1.0]],
        "scores": [1.0],
    }
    assert compute_rollout_metrics([whole], Usage()) == {
        "length/mean": 3.0,
        "length/max": 3.0,
        "entropy/sampling": 0.5,
    }


def test_staleness_is_known_token_by_token():
    usage = Usage()
    with usage.track_request([7, 8]):
        usage.record_sequence([3, 4], [-0.5, -1.5], "stop", usage.version)
    usage.version += 2
    with usage.track_request([7, 8]):
        usage.record_sequence([5], [-1.0], "length", usage.version)
    found = compute_rollout_metrics([group([3, 4], [-0.5, -1.5]), group([5], [-1.0])], usage)
    assert found == {
        "length/mean": 1.5, "length/max": 2.0, "entropy/sampling": 1.0, "staleness/mean": 1.0,
        "staleness/max": 2.0,
    }  # fmt: skip
    elsewhere = compute_rollout_metrics([group([9], [-1.0])], usage)
    assert "staleness/mean" not in elsewhere
    assert (usage.prefill, usage.sampled, usage.completions, usage.truncated) == (4, 3, 2, 1)


def test_a_request_that_fails_is_counted_and_no_longer_under_way():
    usage = Usage()
    with contextlib.suppress(RuntimeError), usage.track_request([1]):
        assert usage.to_json()["in_request"] == 1
        raise RuntimeError
    assert (usage.to_json()["in_request"], usage.failed, usage.prefill) == (0, 1, 0)


def test_the_ledger_goes_on_after_a_resume(tmp_path):
    metrics, tally = MetricsFile(tmp_path / "metrics.jsonl"), tmp_path / "environment.json"
    prices = Prices(prefill=1, sample=10, train=100, dated="2026-10-07")
    usage = Usage()
    folder = RunDir(tmp_path.parent, tmp_path.name)
    first = StepAccounting(folder, prices)
    usage.prefill, usage.sampled, usage.trained = 100, 20, 3
    tally.write_text(
        json.dumps(
            {
                "written_at": 1.0,
                "pid": 1,
                "invalid_rollouts": 5,
                "failed_groups": 1,
                "dropped_rollouts": 2,
            }
        )
    )
    step = first.compute_step_metrics(usage, duration_s=2.0)
    assert (
        step["tokens/prefill"],
        step["tokens/sampled_total"],
        step["tokens_per_second/sampled"],
    ) == (100, 20, 10.0)
    assert step["cost/step"] == pytest.approx((100 + 200 + 300) / 1e6)
    assert (step["rollouts/invalid"], step["rollouts/raised"], step["rollouts/dropped"]) == (
        5,
        1,
        2,
    )
    metrics.append(1, step)

    tally.write_text(json.dumps({"written_at": 2.0, "pid": 2, "invalid_rollouts": 1}))
    again = StepAccounting(folder, prices)
    usage = Usage()
    usage.sampled = 7
    step = again.compute_step_metrics(usage, duration_s=1.0)
    assert (step["tokens/sampled"], step["tokens/sampled_total"], step["tokens/prefill_total"]) == (
        7,
        27,
        100,
    )
    assert step["cost/total"] == pytest.approx((600 + 70) / 1e6)
    assert again.compute_spent(usage) == {"tokens": 130.0, "cost_usd": 0.00067}


def test_what_is_spent_counts_before_a_step_ends(tmp_path):
    """An environment whose groups are all dropped samples for hours; the next attempt knows of
    it.
    """
    folder, usage = RunDir(tmp_path.parent, tmp_path.name), Usage()
    ledger = StepAccounting(folder, Prices(prefill=1, sample=10, train=100, dated="2026-10-07"))
    usage.prefill, usage.sampled = 1000, 500
    assert ledger.compute_spent(usage) == {"tokens": 1500.0, "cost_usd": 0.006}
    # What the trainer reports is what its supervision compares with the budget.
    live = TrainerState(usage=usage, get_spent=lambda: ledger.compute_spent(usage)).get_spent()
    exceeded = budgets.find_exceeded_limit(
        LimitsSection(max_tokens=1500), budgets.BudgetUsage(hours=0, **live)
    )
    assert exceeded is not None
    assert exceeded.describe() == "budget: 1,500 of 1,500 tokens"
    ledger.write_spent(usage)
    assert StepAccounting(folder, None).compute_spent(Usage())["tokens"] == 1500
    record = RunRecord.model_construct(started_at=None, earlier_hours=0.0)
    last = {"tokens/prefill_total": 900.0, "tokens/sampled_total": 480.0, "cost/total": 0.0057}
    assert budgets.compute_budget_usage(record, last).tokens == 1380
    used = budgets.compute_budget_usage(record, last, saved=budgets.read_spent_file(folder.spent))
    assert (used.tokens, used.cost_usd) == (1500, 0.006), (
        "what came after the last step counts against the budget of a resume"
    )
    folder.metrics.write_text(
        json.dumps({"step": 1, "tokens/sampled_total": 700}) + "\n" + '{"step": 2, "tokens/sam'
    )
    assert StepAccounting(folder, None).total_tokens.sampled == 700, "the last line may be cut off"


def test_completions_that_are_cut_off_are_counted_per_step(tmp_path):
    """A share over the whole run would hide that they have become many."""
    ledger, usage = StepAccounting(RunDir(tmp_path.parent, tmp_path.name), None), Usage()
    usage.completions, usage.truncated = 8, 0
    assert ledger.compute_step_metrics(usage, 1.0)["rollouts/truncated_share"] == 0
    usage.completions, usage.truncated = 12, 3
    assert ledger.compute_step_metrics(usage, 1.0)["rollouts/truncated_share"] == 0.75
    assert "rollouts/truncated_share" not in ledger.compute_step_metrics(usage, 1.0), (
        "nothing was sampled"
    )


async def test_weights_that_do_not_move_are_seen(engine, monkeypatch):
    """Let updates change nothing, by the engine's switch for tests: the check measures 0."""
    monkeypatch.setenv("TINKER_BASE_URL", engine.url)
    monkeypatch.setenv("TINKER_API_KEY", engine.token)
    config = run_config.resolve_run_config("arithmetic", "embedded", {}, model=engine.model)
    policy = await Policy.create(config, resume_from=None)
    await policy.publish()
    logprobs = [-5.0] * 4
    rollouts = [group([3, 4, 5, 6], logprobs, 1.0), group([9, 9, 9, 9], logprobs, 0.0)]
    merged = {key: [rollout[key][0] for rollout in rollouts] for key in rollouts[0]}
    batch = to_batch([merged], BatchSettings(max_tokens=64, eos_id=None))
    sync_check, switch = WeightSyncCheck(policy), engine.store / "freeze-weights"
    changes = []
    try:
        for number in range(4):
            if number == 2:
                switch.touch()
            await policy.train(batch, 1e-3)
            sync_check.start_change_measurement(batch.datums[0].tokens)
            changes.append(await sync_check.finish_change_measurement())
    finally:
        switch.unlink(missing_ok=True)
        await policy.close("success")
    assert changes[0] is None, "there is nothing to compare the first version with"
    assert changes[1] is not None
    assert changes[1] > 1e-5
    assert np.allclose(changes[2:], 0.0, atol=1e-9)
