"""What a call of `evaluate()` asks, and what is made of whatever it does."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lachesis.base.json_text import read_json_lines
from lachesis.environment_process import request_counters
from lachesis.environment_process import requested_evaluations as module
from lachesis.environment_process.evaluation_recorder import (
    EvaluationRun,
    count_items,
    count_text_items,
)
from lachesis.environment_process.requested_evaluations import evaluate_and_report
from tests.environment_process.evaluated import Env, append, append_after_a_log
from tests.harness.http_answers import Reply, serve_answers


def chat(*texts):
    return [{"role": "user", "content": text} for text in texts]


async def test_requests_go_to_the_weights_of_the_evaluation(installed):
    """Those at our server, through clients with limits of their own, from tasks and threads of the
    evaluation too.
    """
    manager, ours, judge = installed
    before, seen = manager.servers, []

    async def work(env):
        own, other = manager.servers
        seen.append(
            (
                own.config.base_url,
                own.sem is before[0].sem,
                own.sem.max_val,
                other is before[1],
                request_counters.is_evaluation_request.get(),
            )
        )
        await asyncio.gather(
            *(
                asyncio.create_task(manager.servers[1].chat_completion(messages=chat("1+1=")))
                for _ in range(2)
            )
        )
        seen.append(await asyncio.to_thread(lambda: manager.servers[0].config.base_url))
        await env.evaluate_log({"eval/percent_correct": 1.0})

    url = ours.url.removesuffix("/v1")
    report = await evaluate_and_report(Env(work), EvaluationRun(url, "/evaluations/7"))
    pinned = f"{url}/evaluations/7/v1"
    assert seen == [(pinned, False, before[0].config.num_requests_for_eval, True, True), pinned]
    assert report == {"metrics": {"eval/percent_correct": 1.0}, "items": 0}, (
        "a judge answers no held-out item"
    )
    assert manager.servers is before
    assert judge.keys == {"Bearer k"}


async def test_items_are_the_prompts_that_continue_no_other(installed):
    manager, ours, _ = installed

    async def work(env):
        for texts in (("1+1=",), ("1+1=",), ("1+1=", "2", "and 3+4="), ("5+6=",)):
            await manager.servers[0].chat_completion(messages=chat(*texts))
        return {"accuracy": 0.5}

    report = await evaluate_and_report(Env(work), EvaluationRun(ours.url.removesuffix("/v1")))
    assert report == {"metrics": {"accuracy": 0.5}, "items": 2}
    assert count_items([(1, 2), (1, 2, 3, 4), (1, 3), (10,), (1, 2, 3)]) == 3
    assert count_items([]) == 0


async def test_texts_are_items_unless_they_continue_an_answered_one(installed):
    """A text may begin with another one by chance."""
    manager, ours, _ = installed
    answers = {"1+1": " is 2", "1+12": " is 13", "1+13": "", "1+1 is 2, and 3+4": " is 7"}

    async def complete(self, **options):
        return SimpleNamespace(choices=[SimpleNamespace(text=answers[options["prompt"]])])

    async def work(env):
        for prompt in answers:
            await manager.servers[0].completion(prompt=prompt)
        return {"accuracy": 0.5}

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(manager.servers[0]), "_completion_wrapper", complete)
        report = await evaluate_and_report(Env(work), EvaluationRun(ours.url.removesuffix("/v1")))
    assert report == {"metrics": {"accuracy": 0.5}, "items": 3}
    assert count_text_items(["a", "ab", "abcd", "x"], ["ab", "abc", "y"]) == 3
    assert count_text_items([], ["a"]) == 0


async def _raise(env):
    raise ValueError("no held-out items")


async def _append_before_a_log(env):
    env.eval_metrics.append(("eval/accuracy", 1.0))
    env.eval_metrics = []


async def _append_after_numbers(env):
    env.eval_metrics.extend([0.5, (1, 2, 3), ("eval/accuracy", 1.0)])


async def _name_by_pairs(env):
    return {("a", "b"): 0.3, "accuracy": 1.0}


async def _nothing(env):
    pass


async def _cancel(env):
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("work", "report"),
    [
        (_raise, {"error": "evaluate() raised ValueError: no held-out items"}),
        (append, {"metrics": {"eval/accuracy": 1.0}, "items": 0}),
        (append_after_a_log, {"metrics": {"eval/accuracy": 1.0}, "items": 0}),
        (_append_before_a_log, {"metrics": {"eval/accuracy": 1.0}, "items": 0}),
        (_append_after_numbers, {"metrics": {"eval/accuracy": 1.0}, "items": 0}),
        (_name_by_pairs, {"metrics": {"('a', 'b')": 0.3, "accuracy": 1.0}, "items": 0}),
        (
            _nothing,
            {
                "is_last": True,
                "error": "evaluate() returned no metrics; it must return them or call "
                "evaluate_log(metrics)",
            },
        ),
        (_cancel, {"error": "evaluate() was cancelled"}),
    ],
    ids=[
        "raises",
        "appends",
        "appends after a log",
        "appends before a log",
        "appends after numbers",
        "names by pairs",
        "nothing",
        "cancelled",
    ],
)
async def test_whatever_an_evaluation_does_is_reported(work, report):
    assert await evaluate_and_report(Env(work), EvaluationRun("http://127.0.0.1:9")) == report


async def test_metrics_that_were_no_pairs_before_are_no_error():
    """They are there before evaluate() is called."""
    env = Env(append)
    env.eval_metrics = [0.5]
    report = await evaluate_and_report(env, EvaluationRun("http://127.0.0.1:9"))
    assert report == {"metrics": {"eval/accuracy": 1.0}, "items": 0}


class Trainer:
    """Answers each question for the next evaluation by calling `offer`, and keeps the reports.

    What `offer` gives is sent as JSON; None is no answer at all.
    """

    def __init__(self):
        self.offer: Callable[[], Any] = lambda: {"over": True}
        self.has_given_up = False
        self.reports: list[tuple[str, dict[str, Any]]] = []
        self.url = ""

    def answer(self, request):
        if request.method == "GET":
            return self.offer()
        if body := request.json():
            self.reports.append((request.path.rpartition("/")[2], body))
        return Reply(410 if self.has_given_up else 200)


@pytest.fixture
def trainer(monkeypatch):
    """A trainer that says that no evaluation will come."""
    monkeypatch.setattr(module, "POLL_INTERVAL_S", 0.01)
    trainer = Trainer()
    with serve_answers(trainer.answer) as trainer.url:
        yield trainer


class Training(Env):
    """An environment that has made its last group, two steps before the end of training."""

    def __init__(self, work: Any = append) -> None:
        super().__init__(work)
        self.config.steps_per_eval, self.config.total_steps = 2, 8
        self.status_dict = {"current_step": 6}
        self.goes_on = True

    async def env_step_checks(self) -> None:
        pass

    async def env_manager(self) -> None:
        await self.env_step_checks()

    async def get_status(self) -> None:
        if self.goes_on:
            step = self.status_dict["current_step"]
            self.status_dict = {"current_step": min(self.config.total_steps, step + 1)}


def watched(trainer):
    """A class that evaluates when this trainer asks for it."""
    cls = type("Watched", (Training,), {})
    module.EvaluationClient(trainer.url, "token").install_schedule(cls)
    return cls


async def test_an_evaluation_that_the_trainer_has_given_up_is_ended(trainer, monkeypatch):
    """Otherwise it would go on sampling, on a paid server for money."""
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.01)
    trainer.has_given_up, ended = True, []

    async def work(env):
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    offers: Iterator[Any] = iter([offered(1), {"over": True}])
    trainer.offer = lambda: next(offers)
    await asyncio.wait_for(
        module.EvaluationClient(trainer.url, "t").run_evaluations(Training(work)), 5
    )
    assert (ended, trainer.reports) == ([True], [])


@pytest.mark.usefixtures("installed")
async def test_answers_of_the_newest_step_are_kept_beside_those_of_the_start(trainer, tmp_path):
    async def work(env):
        await env.evaluate_log({"accuracy": 1.0}, samples=[{"question": "1+1", "score": 1.0}])

    offers: Iterator[Any] = iter(
        [offered(0), {**offered(0), "is_base": True}, offered(5), offered(3), {"over": True}]
    )
    trainer.offer = lambda: next(offers)
    client = module.EvaluationClient(trainer.url, "token", folder=tmp_path)
    await client.run_evaluations(Training(work))
    assert sorted(os.listdir(tmp_path)) == ["base", "step-0", "step-3"]
    assert read_json_lines(tmp_path / "step-3" / "samples.jsonl") == [
        {"question": "1+1", "score": 1.0}
    ]


async def test_the_evaluation_of_the_last_step_is_made_though_the_last_group_was_made_before(
    trainer,
):
    """Atropos leaves its loop as soon as enough batches wait."""
    env = watched(trainer)()
    offers = iter([{"id": "last", "step": 8}, {"over": True}])

    def offer():
        if env.status_dict["current_step"] < 8:
            time.sleep(0.01)
            return {}
        return next(offers)

    trainer.offer = offer
    await env.env_manager()
    ((name, report),) = trainer.reports
    assert (name, report["metrics"]) == ("last", {"eval/accuracy": 1.0})


async def test_training_that_stands_still_is_not_waited_for(trainer, monkeypatch):
    monkeypatch.setattr(module, "MAX_STEP_WAIT_S", 0.05)

    def offer():
        time.sleep(0.01)
        return {}

    trainer.offer, env = offer, watched(trainer)()
    env.goes_on = False
    await env.env_manager()
    assert env.status_dict["current_step"] == 6


def offered(number):
    return {"id": str(number), "step": number, "is_base": False}


class Unreadable:
    """A value that is not a number, and says so in its own way."""

    def __float__(self):
        raise RuntimeError("only one element tensors can be converted")


async def test_nothing_but_the_trainers_word_ends_the_evaluations_before_the_last_step(
    trainer, monkeypatch
):
    """Neither a question without an answer, however long it takes, nor metrics of whatever kind."""
    monkeypatch.setattr(module, "MAX_TRAINER_SILENCE_S", 0.0)
    found: list[Any] = [
        {("a", "b"): 0.3, "value": Unreadable(), "accuracy": 0.5},
        {"nested": {("a", "b"): 0.3}},
        {"accuracy": 1.0},
    ]
    results = iter(found)

    async def work(env):
        return next(results)

    answers = [None, offered(1), "odd", offered(2), None, offered(3), {"over": True}]
    offers: Iterator[Any] = iter(answers)
    trainer.offer = lambda: next(offers)
    env = Training(work)
    env.goes_on = False
    await module.EvaluationClient(trainer.url, "token").run_evaluations(env)
    first, second, third = (report for _, report in trainer.reports)
    assert first["metrics"] == {"('a', 'b')": 0.3, "value": None, "accuracy": 0.5}
    assert second["error"].startswith("the metrics of evaluate() are not JSON: TypeError")
    assert third["metrics"] == {"accuracy": 1.0}


async def test_a_trainer_that_is_gone_after_the_last_step_is_not_waited_for(trainer, monkeypatch):
    monkeypatch.setattr(module, "MAX_TRAINER_SILENCE_S", 0.05)
    env = Training()
    env.status_dict = {"current_step": 8}
    trainer.offer = lambda: None
    await module.EvaluationClient(trainer.url, "token").run_evaluations(env)
    assert trainer.reports == []
