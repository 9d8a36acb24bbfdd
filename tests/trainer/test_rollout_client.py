"""The real Atropos API."""

import asyncio
import gzip
import json
import signal
from typing import Any

import httpx
import psutil
import pytest

from lachesis.base.errors import ServerDownError
from lachesis.config import run_config as run_config
from lachesis.supervision.services.ports import reserve_free_ports
from lachesis.trainer.rollout_client import RolloutClient
from tests.harness.processes import api_process
from tests.harness.waiting import wait_until

CONFIG = run_config.resolve_run_config(
    "arithmetic", "embedded", {"env": {"batch_size": 4, "group_size": 2}}
)


async def until_connected(pid, clients=1):
    """Wait until this process has accepted as many connections."""

    def is_connected():
        connections = psutil.Process(pid).net_connections("tcp")
        return [connection.status for connection in connections].count("ESTABLISHED") >= clients

    await asyncio.to_thread(wait_until, is_connected, 20)


def scored(*scores):
    count = len(scores)
    rollouts: dict[str, Any] = {
        "tokens": [[1, 2]] * count,
        "masks": [[-100, 2]] * count,
        "scores": list(scores),
    }
    return {**rollouts, "inference_logprobs": [[1.0, -1.0]] * count}


async def post(url, group):
    async with httpx.AsyncClient() as client:
        answer = await client.post(
            f"{url}/scored_data",
            content=json.dumps(group),
            headers={"Content-Type": "application/json"},
        )
        assert answer.status_code == 200


async def test_batches_arrive_once_they_are_full(api, tmp_path):
    atropos = RolloutClient(api)
    await atropos.register(CONFIG, first_step=0, checkpoint_dir=tmp_path)
    waiting = asyncio.create_task(atropos.next_batch(0))
    await post(api, scored(1.0, 0.0))
    await post(api, scored(0.5, 0.0))
    groups = await asyncio.wait_for(waiting, 10)
    # A batch that was not full would hold the first group alone.
    assert sorted(tuple(group["scores"]) for group in groups) == [(0.5, 0.0), (1.0, 0.0)]
    await atropos.close()


async def test_the_api_itself_waits_for_a_batch(api, tmp_path):
    """One question is enough; and one that nobody listens to any more is not given the batch."""
    atropos = RolloutClient(api)
    await atropos.register(CONFIG, first_step=0, checkpoint_dir=tmp_path)
    async with httpx.AsyncClient(base_url=api) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.get("/batch", params={"wait": 30}, timeout=0.5)
        assert (await client.get("/batch", params={"wait": 1})).json() == {"batch": None}
        assert (await client.get("/batch", params={"wait": "soon"})).json() == {"batch": None}
        waiting = asyncio.create_task(client.get("/batch", params={"wait": 30}, timeout=60))
        await post(api, scored(1.0, 0.0))
        await post(api, scored(0.5, 0.0))
        answer = await asyncio.wait_for(waiting, 10)
        assert len(answer.json()["batch"]) == 2
    await atropos.close()


async def test_an_environment_that_has_made_enough_is_answered_when_a_batch_is_taken(tmp_path):
    """Or after a while, as it has other things to look after; one with an allocation of its own is
    answered at once.
    """
    with api_process(tmp_path, "--offpolicy", "1") as (url, _):
        atropos = RolloutClient(url)
        await atropos.register(CONFIG, first_step=0, checkpoint_dir=tmp_path)
        async with httpx.AsyncClient(base_url=url) as client:

            async def register(allocation):
                wanted = {
                    "max_token_length": 64,
                    "desired_name": "a",
                    "weight": 1.0,
                    "group_size": 2,
                }
                answer = await client.post(
                    "/register-env", json={**wanted, "min_batch_allocation": allocation}
                )
                return int(answer.json()["env_id"])

            async def make_enough(number):
                for _ in range(2):
                    await post(url, {**scored(1.0, 0.0), "env_id": number})

            async def queued(number):
                return int(
                    (await client.request("GET", "/status-env", json={"env_id": number})).json()[
                        "queue_size"
                    ]
                )

            await client.get("/batch")  # the trainer is there
            number = await register(None)
            assert await queued(number) == 0
            await make_enough(number)
            assert await queued(number) == 2
            asked = asyncio.create_task(queued(number))
            assert len(await atropos.next_batch(0)) == 2
            assert await asked == 0, "an answer that did not wait for the batch would be 2"
            await make_enough(number)
            waiting, allocated = (
                asyncio.create_task(queued(number)),
                asyncio.create_task(queued(await register(0.5))),
            )
            await asyncio.wait({waiting, allocated}, return_when=asyncio.FIRST_COMPLETED)
            assert (waiting.done(), allocated.done()) == (False, True)
            assert await waiting == 2
        await atropos.close()


async def test_an_api_that_is_told_to_end_leaves_who_waits_for_a_batch(tmp_path):
    with api_process(tmp_path) as (url, process):
        atropos = RolloutClient(url)
        await atropos.register(CONFIG, first_step=0, checkpoint_dir=tmp_path)
        async with httpx.AsyncClient() as client:
            waiting = asyncio.create_task(
                client.get(f"{url}/batch", params={"wait": 300}, timeout=600)
            )
            await until_connected(process.pid, clients=2)  # this one and the trainer's
            process.terminate()
            assert await asyncio.to_thread(process.wait, 20) == -signal.SIGTERM
            assert (await waiting).status_code == 500, (
                "which a trainer takes for an API that is away"
            )
        await atropos.close()


async def test_an_api_that_was_started_anew_is_told_again(tmp_path):
    """The trainer waits while there is none, and goes on at its step."""
    with api_process(tmp_path) as (url, first):
        atropos = RolloutClient(url)
        await atropos.register(CONFIG, first_step=0, checkpoint_dir=tmp_path)
        waiting = asyncio.create_task(atropos.next_batch(7))
        await until_connected(first.pid)
        first.kill()
        first.wait()
    with api_process(tmp_path, port=int(url.rsplit(":", 1)[1])):
        async with httpx.AsyncClient() as client:
            for _ in range(100):
                told = (await client.get(f"{url}/status")).json().get("current_step")
                if told == 7:
                    break
                await asyncio.sleep(0.1)
            assert told == 7
        for _ in range(2):
            await post(url, scored(1.0, 0.0))
        assert len(await asyncio.wait_for(waiting, 10)) == 2


async def test_an_api_that_stays_away_is_told(monkeypatch):
    monkeypatch.setattr("lachesis.trainer.rollout_client.MAX_OUTAGE_S", 0.5)
    with pytest.raises(ServerDownError, match="does not answer /batch: ConnectError"):
        await RolloutClient(f"http://127.0.0.1:{reserve_free_ports(1)[0]}").next_batch(0)


async def test_what_would_block_or_poison_the_api_is_refused(api, tmp_path):
    """Groups from before the registration are sent again by their environment; unusable ones are
    counted with the reason.
    """
    async with httpx.AsyncClient(base_url=api) as client:
        early = await client.post("/scored_data", json=scored(1.0, 0.0))
        assert early.status_code == 503
        atropos = RolloutClient(api)
        await atropos.register(CONFIG, first_step=5, checkpoint_dir=tmp_path)
        assert (await client.get("/status")).json()["current_step"] == 5
        for bad, reason in (
            (scored(float("nan"), 0.0), "a score is nan"),
            (scored(1e300, 0.0), "a score is 1e+300"),
            ({**scored(1.0, 0.0), "scores": [1.0]}, "2 rollouts and 1 scores"),
            ({**scored(), "tokens": []}, "at least one rollout"),
            ({"tokens": 1}, "a group must be an object"),
            (7, "a group must be an object"),
        ):
            answer = await client.post(
                "/scored_data",
                content=json.dumps(bad),
                headers={"Content-Type": "application/json"},
            )
            assert answer.status_code == 422
            assert reason in answer.json()["detail"]
        many = await client.post("/scored_data_list", content="[" * 100_000)
        assert many.status_code == 422
        packed = gzip.compress(json.dumps(scored(1.0, 0.0)).encode())
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        assert (await client.post("/scored_data", content=packed, headers=headers)).json() == {
            "status": "received"
        }
        await client.post("/scored_data_list", json=[scored(1.0, 0.0)])
        assert len(await asyncio.wait_for(atropos.next_batch(5), 10)) == 2
        assert await atropos.read_queue_counts() == {"queue/dropped": 0, "queue/refused": 7}
        assert "a group must be an object" in (await client.get("/counts")).json()["refusal"]
        for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
            assert (await client.get("/reset_data", headers=headers)).status_code == 403
    await atropos.close()


def changed(name, value):
    return {**scored(1.0, 0.0), name: value}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (
            changed("masks", [[-100, 2]]),
            "a group has 2 rollouts and 1 masks; needed: one list per rollout",
        ),
        (changed("inference_logprobs", [[1.0, -1.0]]), "2 rollouts and 1 inference_logprobs"),
        (changed("tokens", [[1, 2]]), "a group has 1 rollouts and 2 scores"),
        (
            changed("masks", [[-100, 2], [-100]]),
            "rollout 1 has 2 tokens and 1 masks; needed: one entry per token",
        ),
        (
            changed("inference_logprobs", [[1.0], [1.0, -1.0]]),
            "rollout 0 has 2 tokens and 1 inference_logprobs",
        ),
        (
            changed("inference_logprobs", [[1.0, float("nan")]] * 2),
            "inference_logprobs holds a number that is not finite",
        ),
        (changed("advantages", [[float("inf")]]), "advantages holds a number that is not finite"),
        (changed("tokens", [[1, "x"]] * 2), "tokens holds something other than lists of numbers"),
        (changed("masks", 3), "the lists tokens, masks and scores"),
        (changed("overrides", "all"), "overrides is 'all'; a list or null is needed"),
        (
            changed("overrides", [{"parts": {"form": float("nan")}}, {}]),
            "overrides holds a number that is not finite",
        ),
        (changed("group_overrides", [1]), "group_overrides is [1]; an object or null is needed"),
        (
            changed("distill_token_ids", [[[1], [2]]] * 2),
            "distill_token_ids and distill_logprobs must be given together",
        ),
        (
            {**changed("distill_token_ids", [[[1]]] * 2), "distill_logprobs": [[[0.0]]] * 2},
            "1 distill_token_ids; needed: one entry",
        ),
        (changed("env_id", -7), "env_id is -7"),
        (changed("messages", [[1]]), "TypeError"),
        (changed("tokens", [[1, 2.5]] * 2), "int_from_float"),
    ],
)
async def test_a_group_that_cannot_be_trained_on_is_refused(registered, bad, reason):
    """With its reason, and counted; those beside it in the same message are taken, and the batch is
    whole.
    """
    url, atropos = registered
    headers = {"Content-Type": "application/json"}
    async with httpx.AsyncClient(base_url=url) as client:
        before = (await client.get("/counts")).json()
        alone = await client.post("/scored_data", content=json.dumps(bad), headers=headers)
        assert (alone.status_code, reason in alone.json()["detail"]) == (422, True), alone.text
        counts = (await client.get("/counts")).json()
        assert (counts["refused"] - before["refused"], counts["received"]) == (
            1,
            before["received"],
        )
        assert reason in counts["refusal"]
        mixed = await client.post(
            "/scored_data_list", content=json.dumps([scored(1.0, 0.0), bad]), headers=headers
        )
        assert (mixed.status_code, mixed.json()["groups_processed"]) == (200, 1)
        await post(url, scored(0.5, 0.0))
        groups = await asyncio.wait_for(atropos.next_batch(0), 10)
        assert sorted(tuple(group["scores"]) for group in groups) == [(0.5, 0.0), (1.0, 0.0)]


@pytest.fixture(scope="module")
def shared_api(tmp_path_factory):
    with api_process(tmp_path_factory.mktemp("api")) as (url, _):
        yield url


@pytest.fixture
async def registered(shared_api, tmp_path):
    """The address of an API at which a trainer has registered, and that trainer's client."""
    atropos = RolloutClient(shared_api)
    await atropos.register(CONFIG, first_step=0, checkpoint_dir=tmp_path)
    yield shared_api, atropos
    await atropos.close()


async def test_an_empty_message_is_answered(registered):
    async with httpx.AsyncClient(base_url=registered[0]) as client:
        assert (await client.post("/scored_data_list", json=[])).json()["groups_processed"] == 0


async def test_the_queue_is_bounded_and_the_oldest_groups_go(api, tmp_path):
    """Three batches of two groups may wait and one more be filled; a batch that cannot be filled is
    told apart.
    """
    atropos = RolloutClient(api)
    await atropos.register(CONFIG, first_step=0, checkpoint_dir=tmp_path)
    for number in range(20):
        await post(api, scored(float(number), -1.0))
    async with httpx.AsyncClient(base_url=api) as client:
        told = (await client.get("/counts")).json()
        assert (told["received"], told["dropped"], told["queue_size"], told["queued"]) == (
            20,
            12,
            8,
            {"2": 8},
        )
        first = await atropos.next_batch(0)
        assert [group["scores"][0] for group in first] == [18, 19], "the newest batch comes first"
        assert (await client.get("/counts")).json()["formed"] == 3
        await post(api, scored(1.0, 2.0, 3.0))
        told = (await client.get("/counts")).json()
        assert (told["queued"], told["batch_size"]) == ({"3": 1}, 4)
    await atropos.close()


async def test_an_api_that_is_not_there_is_told(tmp_path):
    atropos = RolloutClient("http://127.0.0.1:9")
    with pytest.raises(
        ServerDownError, match=r"Atropos API at http://127.0.0.1:9 does not answer /reset_data"
    ):
        await atropos.register(CONFIG, first_step=0, checkpoint_dir=tmp_path)
