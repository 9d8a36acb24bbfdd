"""Evaluations during training: when they are due, what they see, what comes of them, and that no
step waits.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from lachesis.base.json_text import read_json_lines
from lachesis.checkpoints.manifests import Checkpoints
from lachesis.runs.held_out_results import build_held_out_curve
from lachesis.trainer import evaluation_schedule as module
from lachesis.trainer.evaluation_schedule import EvaluationEndedError, EvaluationScheduler
from tests.trainer.test_exact_resume import Run

pytestmark = pytest.mark.timeout(300)
GRADED = Path(__file__).resolve().parents[1] / "environments" / "graded.py"
STEPS, EVERY = 24, 8
# The change of the weights after each step, their comparison with a reference, and the probe texts
# of checkpoints.
LOGPROB_REQUESTS = 42
RIGHT = {"metrics": {"eval/percent_correct": 0.5}, "items": 4}


@pytest.fixture(scope="module")
def run(tmp_path_factory, random_model):
    """A run whose evaluations are sound, raise, return what is no share, and are sound again."""
    folder = tmp_path_factory.mktemp("graded")
    made = Run(folder, random_model, steps=STEPS, env={"steps_per_eval": EVERY}, environment=GRADED)
    made.attempt()
    return made


def test_every_evaluation_reaches_the_metrics(run):
    """Each has the step of its weights, also that of the last step, which ends after training."""
    lines = run.steps()
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [int(line["eval/step"]) for line in lines if "eval/step" in line] == [0, 16, 24]
    curve = build_held_out_curve(lines)
    assert [(point.step, point.percent_correct, point.items) for point in curve] == [
        (0, 0.5, 4),
        (24, 0.5, 4),
    ]
    assert all(
        point.low is not None and point.high is not None and point.low < 0.5 < point.high
        for point in curve
    )
    (returned,) = [line for line in lines if line.get("eval/step") == 16]
    assert (returned["eval/quality"], returned["eval/items"]) == (2.5, 4)


def test_an_evaluation_that_raises_is_counted_and_named(run):
    (failed,) = read_json_lines(run.folder.failed_evaluations)
    assert (failed["step"], failed["reason"]) == (
        8,
        "evaluate() raised ValueError: no held-out items",
    )
    assert sum(line.get("eval/failed") or 0 for line in run.steps()) == 1


def test_an_evaluation_sees_one_version_of_the_weights_while_steps_are_made(run):
    lines = [line for line in run.steps() if "eval/step" in line]
    assert [line["eval/apart"] for line in lines] == [0.0] * 3
    assert len({line["eval/logprob"] for line in lines}) == 3, "and each another one"
    assert next(line["step"] for line in lines if line["eval/step"] == 0) >= 3, (
        "no step waited for its end"
    )


def test_a_result_belongs_to_the_checkpoint_of_its_weights(run):
    found = {one.step: one.held_out for one in Checkpoints(run.folder.checkpoints).list_intact()}[
        STEPS
    ]
    assert found is not None
    assert (found.step, found.percent_correct, found.items) == (24, 0.5, 4)


def test_tokens_of_evaluations_are_counted_once(run):
    """Groups are replayed, so every sampled token is one of an evaluation, one per request, or of a
    request for log-probabilities, by which weights are compared.
    """
    spent = json.loads(run.folder.spent.read_text())
    assert spent["sampled"] == 3 * 6 + LOGPROB_REQUESTS, "three evaluations of six requests"
    assert "rollouts/truncated_share" not in run.steps()[-1], "training itself has sampled nothing"


def make_evaluations(**options):
    return EvaluationScheduler(["sums", "words"], **{"every_steps": 10, **options})


class Weights:
    """As much of a sampling client as is kept."""

    asked = 0

    async def compute_logprobs_async(self, prompt):
        self.asked += 1
        return [None]


@pytest.mark.parametrize(
    ("every_steps", "last_step", "expected"),
    [
        (5, 20, [0, 5, 10, 15, 20]),
        (8, 20, [0, 8, 16, 20]),
        (8, None, [0, 8, 16]),
        (0, 20, [0, 20]),
        (-1, None, []),
    ],
)
async def test_an_evaluation_is_due_at_each_multiple_and_at_the_ends(
    every_steps, last_step, expected
):
    evaluations, due = EvaluationScheduler(every_steps=every_steps, last_step=last_step), []
    for step in range(21):
        evaluations.start_round_if_due(step, Weights())  # type: ignore[arg-type]
        if evaluations.step_under_way is not None:
            due.append(evaluations.step_under_way)
            evaluations.finish((await evaluations.wait_for_next(""))["id"], RIGHT)
    assert due == expected
    never = EvaluationScheduler(every_steps=0)
    never.start_round_if_due(0, Weights())  # type: ignore[arg-type]
    assert await never.wait_for_next("") == {"over": True}


async def test_the_last_step_waits_for_an_evaluation_that_is_under_way():
    """A short run has made its steps before the evaluation of its start has ended."""
    evaluations, last = EvaluationScheduler(every_steps=2, last_step=3), Weights()
    for step in range(4):
        weights: Any = last if step == 3 else Weights()
        evaluations.start_round_if_due(step, weights)
    assert evaluations.step_under_way == 0
    settled = asyncio.ensure_future(evaluations.wait_for_last_round(asyncio.Event()))
    evaluations.finish((await evaluations.wait_for_next(""))["id"], RIGHT)
    offer = await evaluations.wait_for_next("")
    assert (offer["step"], evaluations.get_sampler(offer["id"])) == (3, last)
    evaluations.finish(offer["id"], RIGHT)
    await settled
    assert [point.step for point in evaluations.results] == [0, 3]
    assert [evaluations.take_metrics()["eval/step"] for _ in range(2)] == [0, 3]
    assert evaluations.take_metrics() == {}


async def test_the_base_model_is_evaluated_once_when_nothing_else_is():
    """Its result is no point of the curve and belongs to no checkpoint; a resume keeps it."""
    base, stop = Weights(), asyncio.Event()
    evaluations = EvaluationScheduler(every_steps=10, base_sampler=base)  # type: ignore[arg-type]
    evaluations.start_round_if_due(0, Weights())  # type: ignore[arg-type]
    offer = await evaluations.wait_for_next("")
    assert (offer["step"], offer["is_base"]) == (0, False)
    evaluations.finish(offer["id"], RIGHT)
    evaluations.take_metrics()
    settled = asyncio.ensure_future(evaluations.wait_for_last_round(stop))
    offer = await evaluations.wait_for_next("")
    assert (offer["step"], offer["is_base"], evaluations.step_awaited) == (0, True, 0)
    evaluations.results.clear()
    assert evaluations.step_awaited is None
    assert evaluations.get_sampler(offer["id"]) is base
    evaluations.finish(offer["id"], RIGHT)
    await settled
    metrics = evaluations.take_metrics()
    assert (metrics["eval_base/percent_correct"], metrics["eval_base/items"]) == (0.5, 4)
    assert build_held_out_curve([{"step": 1, **metrics}]) == evaluations.results == []
    resumed = EvaluationScheduler(every_steps=10, base_sampler=base)  # type: ignore[arg-type]
    resumed.restore_from_metrics([{"step": 9, **metrics}], first_step=5)
    assert resumed.take_metrics() == metrics
    await resumed.wait_for_last_round(stop)
    assert resumed.take_metrics() == {}


async def test_several_environments_evaluate_the_same_weights():
    """The next evaluation begins when all have ended."""
    evaluations, first, second = make_evaluations(), Weights(), Weights()
    evaluations.start_round_if_due(10, first)  # type: ignore[arg-type]
    sums, words = await evaluations.wait_for_next("sums"), await evaluations.wait_for_next("words")
    evaluations.finish(sums["id"], RIGHT)
    with pytest.raises(EvaluationEndedError):
        evaluations.finish(sums["id"], RIGHT)
    evaluations.start_round_if_due(20, second)  # type: ignore[arg-type]
    assert evaluations.get_sampler(words["id"]) is first, "that of step 20 is left out"
    evaluations.finish(
        words["id"], {"metrics": {"eval/percent_correct": 1.0, "items": 2}, "seconds": 1.5}
    )
    assert await evaluations.wait_for_next("sums", wait_s=0.01) == {}
    found = evaluations.take_metrics()
    keys = ("eval/step", "eval/items", "environments/words/eval/percent_correct")
    assert {key: found[key] for key in keys} == {
        "eval/step": 10, "eval/items": 4, "environments/words/eval/percent_correct": 1.0,
    }  # fmt: skip
    assert evaluations.take_metrics() == {}


async def test_an_environment_that_is_silent_from_the_first_step_on_does_not_keep_the_others(
    monkeypatch,
):
    """The environment may still load its data before the first step."""
    monkeypatch.setattr(module, "HEARTBEAT_TIMEOUT_S", 0.05)
    evaluations, weights = make_evaluations(), Weights()
    evaluations.start_round_if_due(0, weights)  # type: ignore[arg-type]
    evaluations.finish((await evaluations.wait_for_next("sums"))["id"], RIGHT)
    await asyncio.sleep(0.1)
    evaluations.start_round_if_due(1, weights)  # type: ignore[arg-type]
    assert evaluations.step_under_way == 0
    await asyncio.sleep(0.1)
    evaluations.start_round_if_due(2, weights)  # type: ignore[arg-type]
    assert evaluations.step_under_way is None
    assert evaluations.take_metrics()["eval/failed"] == 1


async def test_an_environment_without_an_evaluation_is_asked_once(tmp_path):
    failures = tmp_path / "failed.jsonl"
    evaluations = make_evaluations(failures_file=failures)
    for step in (0, 10, 20):
        evaluations.start_round_if_due(step, Weights())  # type: ignore[arg-type]
        if step == 0:
            report = {"error": "evaluate() returned no metrics", "is_last": True}
            evaluations.finish((await evaluations.wait_for_next("words"))["id"], report)
        evaluations.finish((await evaluations.wait_for_next("sums"))["id"], RIGHT)
        assert await evaluations.wait_for_next("words", wait_s=0.01) == {}
        assert evaluations.step_under_way is None
    assert [line["environment"] for line in read_json_lines(failures)] == ["words"]
    alone = EvaluationScheduler(every_steps=10)
    alone.start_round_if_due(0, Weights())  # type: ignore[arg-type]
    alone.finish((await alone.wait_for_next(""))["id"], {"error": "none", "is_last": True})
    alone.start_round_if_due(10, Weights())  # type: ignore[arg-type]
    assert alone.step_under_way is None


async def test_an_environment_that_was_started_again_tries_once_more(tmp_path):
    evaluations = make_evaluations(failures_file=tmp_path / "evaluation" / "failed.jsonl")
    evaluations.environments = ["sums"]
    evaluations.start_round_if_due(10, Weights())  # type: ignore[arg-type]
    lost = await evaluations.wait_for_next("sums")
    again = await evaluations.wait_for_next("sums")
    assert again["step"] == lost["step"] == 10
    with pytest.raises(EvaluationEndedError):
        evaluations.get_sampler(lost["id"])
    assert await evaluations.wait_for_next("sums", wait_s=0.01) == {}
    assert evaluations.step_under_way is None
    (line,) = read_json_lines(tmp_path / "evaluation" / "failed.jsonl")
    assert line["reason"] == "its process ended 2 times during it"


async def test_a_dead_evaluation_lets_its_weights_go(monkeypatch):
    evaluations = EvaluationScheduler(every_steps=10)
    evaluations.start_round_if_due(10, Weights())  # type: ignore[arg-type]
    offer = await evaluations.wait_for_next("")
    monkeypatch.setattr(module, "HEARTBEAT_TIMEOUT_S", -1.0)
    evaluations.start_round_if_due(11, Weights())  # type: ignore[arg-type]
    assert evaluations.step_under_way is None
    assert evaluations.take_metrics() == {"eval/failed": 1}
    with pytest.raises(EvaluationEndedError):
        evaluations.record_heartbeat(offer["id"])


async def test_weights_that_are_held_are_asked_now_and_then():
    """A server may forget those that nobody asks; the embedded engine keeps the newest sixteen."""
    evaluations, held = EvaluationScheduler(every_steps=100), Weights()
    for step in range(33):
        weights: Any = held if step == 0 else Weights()
        evaluations.start_round_if_due(step, weights)
        await asyncio.sleep(0)
    assert (held.asked, evaluations.usage.prefill) == (4, 4)


def test_a_resume_neither_repeats_nor_loses_a_result():
    """Of step 10, which arrived on a line that is made again; that of step 20 is of weights that
    are gone.
    """
    lines = [{"step": step} for step in range(1, 24)]
    lines[11] |= {"eval/step": 10, "eval/percent_correct": 0.25, "eval/failed": 1}
    lines[15] |= {"eval/step": None}
    lines[21] |= {"eval/step": 20, "eval/percent_correct": 0.75}
    evaluations = EvaluationScheduler(every_steps=10)
    evaluations.restore_from_metrics(lines, first_step=10)
    evaluations.start_round_if_due(10, Weights())  # type: ignore[arg-type]
    assert evaluations.step_under_way is None
    assert evaluations.take_metrics() == {"eval/step": 10, "eval/percent_correct": 0.25}


def test_a_resume_keeps_the_results_of_every_environment():
    """They arrive one by one, so that they stand on different lines."""
    lines = [{"step": step} for step in range(1, 15)]
    lines[10] |= {"environments/b/eval/step": 10, "environments/b/eval/percent_correct": 0.5}
    lines[11] |= {"eval/step": 10, "eval/percent_correct": 0.25}
    lines[12] |= {"environments/c/eval/step": 12, "environments/c/eval/percent_correct": 1.0}
    evaluations = EvaluationScheduler(["a", "b", "c"], every_steps=10)
    evaluations.restore_from_metrics(lines, first_step=10)
    assert evaluations.take_metrics() == {
        "environments/b/eval/step": 10,
        "environments/b/eval/percent_correct": 0.5,
        "eval/step": 10,
        "eval/percent_correct": 0.25,
    }


async def test_the_end_waits_for_an_evaluation_and_for_no_dead_one(monkeypatch):
    evaluations, stop = EvaluationScheduler(every_steps=10), asyncio.Event()
    evaluations.start_round_if_due(10, Weights())  # type: ignore[arg-type]
    settled = asyncio.ensure_future(evaluations.wait_for_last_round(stop))
    evaluations.finish((await evaluations.wait_for_next(""))["id"], {"error": "the judge is away"})
    await settled
    assert await evaluations.wait_for_next("") == {"over": True}
    monkeypatch.setattr(module, "HEARTBEAT_TIMEOUT_S", -1.0)
    silent = EvaluationScheduler(every_steps=10)
    silent.start_round_if_due(10, Weights())  # type: ignore[arg-type]
    await silent.wait_for_last_round(stop)
    assert (silent.take_metrics(), silent.step_under_way) == ({"eval/failed": 1}, None)


async def test_what_has_not_ended_in_time_after_the_last_step_is_counted_and_named(
    monkeypatch, tmp_path
):
    """One environment is in the middle of it and one has not begun; a stop has its own words."""
    for limit_s, stopped, reason in (
        (-1.0, False, "it had not ended after -1 s"),
        (600.0, True, "the run was stopped"),
    ):
        monkeypatch.setattr(module, "DEADLINE_S", limit_s)
        failures, stop = tmp_path / f"{limit_s:g}" / "failed.jsonl", asyncio.Event()
        evaluations = make_evaluations(
            failures_file=failures, base_sampler=Weights() if stopped else None
        )
        evaluations.start_round_if_due(10, Weights())  # type: ignore[arg-type]
        offer = await evaluations.wait_for_next("words")
        if stopped:
            stop.set()
        await evaluations.wait_for_last_round(stop)
        reasons = [(line["environment"], line["reason"]) for line in read_json_lines(failures)]
        assert reasons == [("sums", reason), ("words", reason)]
        assert evaluations.take_metrics() == {"eval/failed": 2}
        with pytest.raises(EvaluationEndedError):
            evaluations.finish(offer["id"], RIGHT)


async def test_a_result_that_nobody_has_taken_is_awaited_by_its_checkpoint():
    evaluations = EvaluationScheduler(every_steps=10)
    assert evaluations.step_awaited is None
    evaluations.start_round_if_due(10, Weights())  # type: ignore[arg-type]
    offer = await evaluations.wait_for_next("")
    assert evaluations.step_awaited == 10
    evaluations.finish(offer["id"], RIGHT)
    assert (evaluations.step_under_way, evaluations.step_awaited) == (None, 10)
    evaluations.results.clear()
    assert evaluations.step_awaited is None
