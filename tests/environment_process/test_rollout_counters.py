"""What an environment gives is counted, and a fault of the server never becomes a reward."""

import asyncio
import json
import re
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.server_handling.server_baseline import APIServer
from atroposlib.envs.server_handling.server_manager import ServerManager
from tenacity import Future, RetryError

from lachesis.environment_process.request_counters import install_request_counters
from lachesis.environment_process.rollout_counters import RolloutCounters, install_rollout_counters
from lachesis.environment_toolkit.rollout import AllInvalid
from lachesis.runs.environment_counters import read_all_counts
from tests.harness.openai_endpoint import serving


class Forgiving:
    """Takes an answer that does not come for a wrong one."""

    config = SimpleNamespace(group_size=2)

    def __init__(self, url, model):
        self.server = ServerManager(
            [APIServerConfig(base_url=url, api_key="k", model_name=model, health_check=False)] * 2
        )

    async def get_next_item(self):
        return 1

    async def collect_trajectories(self, item):
        scores = await asyncio.gather(*(self._score(item) for _ in range(2)))
        return {"tokens": [[1], [1]], "masks": [[1], [1]], "scores": scores}, []

    async def _score(self, item):
        try:
            answer = await self.server.chat_completion(
                messages=[{"role": "user", "content": "1+1="}], n=1
            )
        except Exception:
            return 0.0
        return float(answer.choices[0].message.content == "2")

    async def handle_send_to_api(self, scored_data): ...

    async def _send_scored_data_to_api(self, scored_data): ...


@pytest.fixture
def counted(tmp_path, monkeypatch):
    for name in ("chat_completion", "completion", "tokens_and_logprobs_completion"):
        monkeypatch.setattr(APIServer, name, getattr(APIServer, name))
    tally = RolloutCounters(tmp_path / "counters.json")
    cls = type("Watched", (Forgiving,), {})
    install_request_counters(tally)
    install_rollout_counters(tally, cls)
    return tally, cls


async def test_a_group_with_an_unanswered_request_is_invalid(counted):
    """Rather than scored 0, which would teach the model that its text was wrong; the next group is
    judged for itself.
    """
    tally, cls = counted
    with serving() as endpoint:
        assert (await cls(endpoint.url, "status-400").collect_trajectories(1))[0] is None
        assert (tally.counts["invalid_rollouts"], tally.counts["groups"]) == (2, 0)
        assert "although a request for samples had failed" in next(iter(tally.errors))
        assert (await cls(endpoint.url, "right").collect_trajectories(1))[0]["scores"] == [1.0, 1.0]
        assert (tally.counts["invalid_rollouts"], tally.counts["groups"]) == (2, 1)


async def test_items_that_are_used_up_are_counted(tmp_path):
    """Those that a resume passes over count too."""
    remaining = iter([1, 2, None, 3, None])

    class Finite(Forgiving):
        async def get_next_item(self) -> Any:
            return next(remaining)

    counters = RolloutCounters(tmp_path / "counters.json")
    counters.num_items_before = 5
    install_rollout_counters(counters, Finite)
    env, used_up = Finite("http://127.0.0.1:1/v1", "m"), []
    for _ in range(5):
        await env.get_next_item()
        used_up.append(counters.snapshot()["items_used_up"])
    assert used_up == [None, None, 7, None, 8]


ASKED = httpx.Request("POST", "http://127.0.0.1/v1/chat/completions")


def answered(status):
    response = httpx.Response(status, request=ASKED)
    return openai.APIStatusError("no", response=response, body=None)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (answered(400), 0),
        (answered(422), 0),
        (answered(429), 1),
        (answered(502), 1),
        (openai.APIConnectionError(request=ASKED), 1),
        (httpx.ReadTimeout("slow"), 1),
        (TimeoutError(), 1),
        (ConnectionResetError(), 1),
        (ValueError("the prompt is longer than the context"), 0),
    ],
)
async def test_a_refused_request_is_not_a_lost_one(tmp_path, monkeypatch, error, lost):
    """An environment that asks for what the server never gives is at fault; one whose server is
    away is not. Atropos raises a retry that has given up, which holds another one, which holds the
    error."""

    async def fail(self, **options):
        for _ in range(2):
            raised, attempt = error if not attempts else RetryError(attempts[-1]), Future(3)
            attempt.set_exception(raised)
            attempts.append(attempt)
        raise RetryError(attempts[-1])

    attempts: list[Future] = []
    for name in ("chat_completion", "completion", "tokens_and_logprobs_completion"):
        monkeypatch.setattr(APIServer, name, fail)
    tally = RolloutCounters(tmp_path / "counters.json")
    install_request_counters(tally)
    with pytest.raises(RetryError):
        await APIServer.chat_completion(object())
    assert (tally.counts["failed_requests"], tally.counts["lost_requests"]) == (1, lost)


async def test_rollouts_that_the_environment_marks_are_counted_by_their_reasons(tmp_path):
    marks = [{"invalid": "the judge is away"}, {"zero": "it rambles"}, {}, None]

    class Marking(Forgiving):
        async def collect_trajectories(self, item: int) -> Any:
            return {
                "tokens": [[1]] * 4,
                "masks": [[1]] * 4,
                "scores": [0.5, 0.0, 1.0, 0.5],
                "overrides": marks,
            }, []

    tally = RolloutCounters(tmp_path / "counters.json")
    install_rollout_counters(tally, Marking)
    assert (await Marking("http://127.0.0.1:9", "none").collect_trajectories(1))[0]["scores"] == [
        0.5,
        0.0,
        1.0,
        0.5,
    ]
    assert (tally.counts["rollouts"], tally.counts["invalid_rollouts"], tally.counts["groups"]) == (
        3,
        1,
        1,
    )
    assert (tally.errors, tally.zero_reasons) == ({"the judge is away": 1}, {"it rambles": 1})
    assert tally.snapshot()["zero_reasons"] == {"it rambles": 1}


def test_several_environments_are_told_as_one(tmp_path):
    one = {
        "written_at": 5.0,
        "pid": 1,
        "groups": 2,
        "invalid_rollouts": 1,
        "item_since": None,
        "group_since": 3.0,
        "last_group_at": 4.0,
    }
    one |= {"errors": {"a": 1, "b": 2}, "zero_reasons": {}}
    other = {
        **one,
        "written_at": 7.0,
        "pid": 2,
        "item_since": 6.0,
        "group_since": None,
        "last_group_at": 6.5,
        "errors": {"b": 3},
    }
    files = [tmp_path / name for name in ("environment.json", "environment-b.json", "gone.json")]
    for file, content in zip(files, (one, other), strict=False):
        file.write_text(json.dumps(content))
    found = read_all_counts(files)
    assert found is not None
    assert (found["written_at"], found["groups"], found["invalid_rollouts"]) == (5.0, 4, 2)
    assert (found["item_since"], found["group_since"], found["last_group_at"]) == (6.0, 3.0, 6.5)
    assert found["errors"] == {"a": 1, "b": 5}
    assert read_all_counts(files[:1]) == one
    assert read_all_counts(files[2:]) is None


def test_errors_are_counted_by_their_kind(tmp_path):
    """What differs from rollout to rollout makes no kind; what is too much is counted together."""
    tally = RolloutCounters(tmp_path / "counters.json")
    for number in range(50):
        tally.count_error(f"the verifier raised ValueError: invalid literal: 'answer {number}'")
    for word in "abcdefgh":
        tally.count_error(f"fault {word}")
    assert tally.errors["the verifier raised ValueError: invalid literal: 'answer 0'"] == 50
    assert (len(tally.errors), tally.errors["others"]) == (6, 4)


async def test_what_an_environment_raises_is_one_reason_per_line_of_its_code(tmp_path):
    """Whatever its message says; and groups without a valid rollout count the reasons of their
    rollouts.
    """

    class Failing(Forgiving):
        async def get_next_item(self) -> int:
            return 1

        async def collect_trajectories(self, item: int) -> Any:
            if item < 30:
                raise KeyError(f"no city called {'abcdefghijklmnopqrstuvwxyzABCD'[item]}")
            if item < 60:
                return {}[f"word {item}"], []
            raise AllInvalid(
                [f"the judge refused {kind}" for kind in ("to answer", "the key")[: item % 2 + 1]]
            )

    tally = RolloutCounters(tmp_path / "counters.json")
    install_rollout_counters(tally, Failing, max_unusable_groups=1000)
    for item in range(70):
        await Failing("http://127.0.0.1:9", "none").collect_trajectories(item)
    first, second, *others = tally.errors.items()
    assert re.fullmatch(r"KeyError at test_rollout_counters\.py:\d+: 'no city called a'", first[0])
    assert re.fullmatch(r"KeyError at test_rollout_counters\.py:\d+: 'word 30'", second[0])
    assert (first[1], second[1]) == (30, 30)
    assert others == [("the judge refused to answer", 10), ("the judge refused the key", 5)]
    assert tally.counts["invalid_rollouts"] == 140
