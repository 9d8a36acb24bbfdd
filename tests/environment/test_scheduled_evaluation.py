"""What a call of `evaluate()` asks, and what is made of whatever it does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from atroposlib.envs.base import APIServerConfig, BaseEnv
from atroposlib.envs.server_handling.server_baseline import APIServer
from atroposlib.envs.server_handling.server_manager import ServerManager

from lachesis import tally
from lachesis.environment import scheduled_evaluation as module
from lachesis.environment.scheduled_evaluation import (
    EvaluationRun,
    count_items,
    count_texts,
    evaluate,
)
from tests.endpoint import serving


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ServerManager, Any, Any]]:
    """Two servers, ours and a judge's, and a manager of both."""
    for cls, names in ((APIServer, module.SAMPLING), (BaseEnv, ("evaluate_log", "_run_evaluate"))):
        for name in names:
            monkeypatch.setattr(cls, name, getattr(cls, name))
    with serving() as ours, serving() as judge:
        configs = [
            APIServerConfig(base_url=one.url, api_key="k", model_name="right", server_type="openai", health_check=False)
            for one in (ours, judge)
        ]
        with monkeypatch.context() as patched:
            patched.setattr(ServerManager, "servers", None, raising=False)
            module.install(ours.url.removesuffix("/v1"))
            yield ServerManager(configs), ours, judge


def chat(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


class Env:
    """An environment with one evaluation."""

    def __init__(self, work: Any) -> None:
        self.config = SimpleNamespace(data_dir_to_save_evals=None)
        self.eval_metrics: list[Any] = [("eval/accuracy", 0.0)]
        self.work = work

    async def evaluate(self) -> Any:
        return await self.work(self)

    async def evaluate_log(self, metrics: dict[str, Any]) -> None:
        await BaseEnv.evaluate_log(self, metrics)  # type: ignore[arg-type]


async def test_requests_go_to_the_weights_of_the_evaluation(installed: Any) -> None:
    """Those at our server, through clients with limits of their own, from tasks and threads of the evaluation too."""
    manager, ours, judge = installed
    before, seen = manager.servers, []

    async def work(env: Env) -> None:
        own, other = manager.servers
        seen.append((own.config.base_url, own.sem is before[0].sem, own.sem.max_val, other is before[1], tally.uncounted.get()))
        await asyncio.gather(
            *(asyncio.create_task(manager.servers[1].chat_completion(messages=chat("1+1="))) for _ in range(2))
        )
        seen.append(await asyncio.to_thread(lambda: manager.servers[0].config.base_url))
        await env.evaluate_log({"eval/percent_correct": 1.0})

    url = ours.url.removesuffix("/v1")
    report = await evaluate(Env(work), EvaluationRun(url, "/evaluations/7"))
    pinned = f"{url}/evaluations/7/v1"
    assert seen == [(pinned, False, before[0].config.num_requests_for_eval, True, True), pinned]
    assert report == {"metrics": {"eval/percent_correct": 1.0}, "items": 0}, "a judge answers no held-out item"
    assert manager.servers is before
    assert judge.keys == {"Bearer k"}


async def test_items_are_the_prompts_that_continue_no_other(installed: Any) -> None:
    manager, ours, _ = installed

    async def work(env: Env) -> dict[str, float]:
        for texts in (("1+1=",), ("1+1=",), ("1+1=", "2", "and 3+4="), ("5+6=",)):
            await manager.servers[0].chat_completion(messages=chat(*texts))
        return {"accuracy": 0.5}

    report = await evaluate(Env(work), EvaluationRun(ours.url.removesuffix("/v1")))
    assert report == {"metrics": {"accuracy": 0.5}, "items": 2}
    assert count_items([(1, 2), (1, 2, 3, 4), (1, 3), (10,), (1, 2, 3)]) == 3
    assert count_items([]) == 0


async def test_texts_are_items_unless_they_continue_an_answered_one(installed: Any) -> None:
    """A text may begin with another one by chance."""
    manager, ours, _ = installed
    answers = {"1+1": " is 2", "1+12": " is 13", "1+13": "", "1+1 is 2, and 3+4": " is 7"}

    async def complete(self: Any, **options: Any) -> Any:
        return SimpleNamespace(choices=[SimpleNamespace(text=answers[options["prompt"]])])

    async def work(env: Env) -> dict[str, float]:
        for prompt in answers:
            await manager.servers[0].completion(prompt=prompt)
        return {"accuracy": 0.5}

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(manager.servers[0]), "_completion_wrapper", complete)
        report = await evaluate(Env(work), EvaluationRun(ours.url.removesuffix("/v1")))
    assert report == {"metrics": {"accuracy": 0.5}, "items": 3}
    assert count_texts(["a", "ab", "abcd", "x"], ["ab", "abc", "y"]) == 3
    assert count_texts([], ["a"]) == 0


async def _raise(env: Env) -> None:
    raise ValueError("no held-out items")


async def _append(env: Env) -> None:
    env.eval_metrics.append(("eval/accuracy", 1.0))


async def _append_after_a_log(env: Env) -> None:
    env.eval_metrics = []
    env.eval_metrics.append(("eval/accuracy", 1.0))


async def _append_before_a_log(env: Env) -> None:
    env.eval_metrics.append(("eval/accuracy", 1.0))
    env.eval_metrics = []


async def _append_after_numbers(env: Env) -> None:
    env.eval_metrics.extend([0.5, (1, 2, 3), ("eval/accuracy", 1.0)])


async def _name_by_pairs(env: Env) -> Any:
    return {("a", "b"): 0.3, "accuracy": 1.0}


async def _nothing(env: Env) -> None:
    pass


async def _cancel(env: Env) -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("work", "report"),
    [
        (_raise, {"error": "evaluate() raised ValueError: no held-out items"}),
        (_append, {"metrics": {"eval/accuracy": 1.0}, "items": 0}),
        (_append_after_a_log, {"metrics": {"eval/accuracy": 1.0}, "items": 0}),
        (_append_before_a_log, {"metrics": {"eval/accuracy": 1.0}, "items": 0}),
        (_append_after_numbers, {"metrics": {"eval/accuracy": 1.0}, "items": 0}),
        (_name_by_pairs, {"metrics": {"('a', 'b')": 0.3, "accuracy": 1.0}, "items": 0}),
        (_nothing, {"error": "evaluate() gave no metrics; it must call evaluate_log(metrics) or return them"}),
        (_cancel, {"error": "evaluate() was cancelled"}),
        (lambda env: asyncio.sleep(60), {"error": "evaluate() was not done after 0.5 s"}),
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
        "hangs",
    ],
)
async def test_whatever_an_evaluation_does_is_reported(monkeypatch: pytest.MonkeyPatch, work: Any, report: Any) -> None:
    monkeypatch.setattr(module, "EVALUATION_S", 0.5)
    assert await evaluate(Env(work), EvaluationRun("http://127.0.0.1:9")) == report


async def test_metrics_that_were_no_pairs_before_are_no_error() -> None:
    """They are there before evaluate() is called."""
    env = Env(_append)
    env.eval_metrics = [0.5]
    report = await evaluate(env, EvaluationRun("http://127.0.0.1:9"))
    assert report == {"metrics": {"eval/accuracy": 1.0}, "items": 0}
