"""Several environments in one run: who may fill a batch, and what each of them reads."""

import asyncio
import random

import httpx
import pytest

from lachesis.base.errors import (
    ConfigError,
    FieldValueError,
    UnknownEnvironmentError,
    UnknownFieldError,
)
from lachesis.base.json_text import Json
from lachesis.config import mixture
from lachesis.config import run_config as run_config
from lachesis.config.launch_spec import LaunchSpec
from lachesis.environment_catalog import lookup
from lachesis.operations.launches import edit_launch, resolve_launch
from lachesis.rollout_api.weighted_queue import WeightedQueue
from lachesis.runs.store import RunStore
from lachesis.trainer.rollout_client import RolloutClient
from tests.harness.processes import api_process


def env(number, weight=1.0, *, connected=True):
    return {
        "registered_id": number,
        "weight": weight,
        "connected": connected,
        "desired_name": f"env{number}",
    }


def group(number, size=4):
    return {"env_id": number, "tokens": [[1]] * size}


def numbers(queue):
    return [one["env_id"] for one in queue]


def test_one_environment_shares_with_nobody():
    queue = [group(0), group(0)]
    WeightedQueue(1).arrange(queue, [env(0)])
    assert numbers(queue) == [0, 0]


def test_no_group_has_its_turn_before_all_environments_are_there():
    shares, queue = WeightedQueue(2), [group(0), group(0)]
    shares.arrange(queue, [env(0)])
    assert queue == []
    queue.append(group(1))
    shares.arrange(queue, [env(0), env(1)])
    assert numbers(queue) == [0, 1, 0]


def test_the_fast_one_waits_for_the_slow_one():
    envs, shares = [env(0, 1.0), env(1, 0.5)], WeightedQueue(2)
    queue = [group(0) for _ in range(6)]
    shares.arrange(queue, envs)
    assert numbers(queue) == [0]
    assert shares.find_awaited_environment(envs) == "env1"
    queue += [group(1), group(1)]
    shares.arrange(queue, envs)
    assert numbers(queue) == [0, 1, 0, 0, 1, 0, 0]
    assert len(shares.waiting_groups[0]) == 1


@pytest.mark.parametrize("seed", range(5))
def test_shares_are_those_of_the_weights_whatever_the_order_of_arrival(seed):
    """Also where groups differ in size: rollouts are shared, not groups. No environment is ever
    ahead by more than a group.
    """
    chance = random.Random(seed)
    weights = [chance.uniform(0.2, 3.0) for _ in range(4)]
    sizes = [chance.choice([2, 4, 8]) for _ in range(4)]
    envs, shares = [env(number, weight) for number, weight in enumerate(weights)], WeightedQueue(4)
    arriving = [group(number, sizes[number]) for number in range(4) for _ in range(400)]
    chance.shuffle(arriving)
    queue: list[Json] = []
    for one in arriving:
        queue.append(one)
        shares.arrange(queue, envs)
        del queue[: chance.randrange(3)]  # a batch takes its groups
    given = [400 - len(shares.waiting_groups.get(number, ())) for number in range(4)]
    passes = [given[number] * sizes[number] / weights[number] for number in range(4)]
    assert max(passes) - min(passes) <= max(
        size / weight for size, weight in zip(sizes, weights, strict=True)
    )


def test_one_that_is_gone_is_not_waited_for_and_one_that_comes_back_is_owed_nothing():
    envs, shares = [env(0), env(1)], WeightedQueue(2)
    queue = [group(0), group(1), group(0), group(0), group(0)]
    shares.arrange(queue, envs)
    assert numbers(queue) == [0, 1, 0]
    envs[1]["connected"] = False
    shares.arrange(queue, envs)
    assert numbers(queue) == [0, 1, 0, 0, 0]
    envs.append(env(2))
    queue += [group(2), group(0), group(2), group(2)]
    shares.arrange(queue, envs)
    assert numbers(queue)[5:] in ([0, 2], [2, 0], [2, 0, 2])


def test_what_waits_is_bounded_by_the_share():
    envs, shares, queue = [env(0), env(1)], WeightedQueue(2), [group(0) for _ in range(20)]
    shares.arrange(queue, envs)
    assert shares.drop_excess(32, envs) == 19 - 4
    assert len(shares.waiting_groups[0]) == 4


def test_each_environment_sees_the_queue_as_if_all_were_as_far():
    envs, shares = [env(0, 1.0), env(1, 0.5)], WeightedQueue(2)
    queue = [group(0), group(0), group(1)]
    shares.arrange(queue, envs)
    assert shares.compute_queue_size(0, queue, envs) == 12
    assert shares.compute_queue_size(1, queue, envs) == 12
    queue.append(group(0))
    shares.arrange(queue, envs)
    assert (
        shares.compute_queue_size(0, queue, envs),
        shares.compute_queue_size(1, queue, envs),
    ) == (18, 12)


async def test_the_real_api_fills_its_batches_by_the_weights(tmp_path):
    config = run_config.resolve_run_config(
        "arithmetic", "embedded", {"env": {"batch_size": 6, "group_size": 2}}
    )
    with api_process(tmp_path, "--environments", "2") as (url, _):
        atropos = RolloutClient(url)
        await atropos.register(config, first_step=0, checkpoint_dir=tmp_path)
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.get("/batch")).json() == {"batch": None}
            for name, weight in (("fast", 1.0), ("slow", 0.5)):
                wanted = {
                    "max_token_length": 64,
                    "desired_name": name,
                    "weight": weight,
                    "group_size": 2,
                }
                assert (await client.post("/register-env", json=wanted)).json()[
                    "status"
                ] == "success"

            async def send(number):
                rollouts = {
                    "tokens": [[1, 2]] * 2,
                    "masks": [[-100, 2]] * 2,
                    "scores": [1.0, 0.0],
                    "env_id": number,
                }
                assert (await client.post("/scored_data", json=rollouts)).status_code == 200

            async def seen(number):
                answer = await client.request("GET", "/status-env", json={"env_id": number})
                return int(answer.json()["queue_size"])

            waiting = asyncio.create_task(atropos.next_batch(0))
            for _ in range(4):
                await send(0)
            assert (await client.get("/counts")).json()["turn"] == "slow"
            assert (await seen(0), await seen(1)) == (6, 0)
            await send(1)
            groups = await asyncio.wait_for(waiting, 10)
            assert sorted(group["env_id"] for group in groups) == [0, 0, 1], (
                "the fast one must not fill the share of the slow one"
            )
            assert (
                await client.request("GET", "/status-env", json={"env_id": 9})
            ).status_code == 404
            waiting = asyncio.create_task(atropos.next_batch(1))
            assert (await client.post("/disconnect-env", json={"env_id": 1})).status_code == 200
            await send(0)
            assert [one["env_id"] for one in await asyncio.wait_for(waiting, 10)] == [0, 0, 0]
        await atropos.close()


# --- configuration
# --------------------------------------------------------------------------------------------------


def resolved(**others):
    edits = {"env": {"batch_size": 24, "group_size": 8, "mixture": others}}
    return run_config.resolve_run_config("arithmetic", "embedded", edits, defaults={"largest": 9})


def test_each_environment_reads_its_own_view():
    config = resolved(reverse_text={"weight": 0.5, "max_token_length": 200, "words": 3})
    parts = config.build_environment_configs()
    assert list(parts) == ["arithmetic", "reverse_text"]
    first, other = (part.env for part in parts.values())
    assert (first.inference_weight, other.inference_weight) == (1.0, 0.5)
    assert first.max_token_length == config.env.max_token_length
    assert other.max_token_length == 200
    assert (first.model_extra, other.model_extra) == ({"largest": 9}, {"words": 3})
    assert (first.group_size, other.group_size) == (8, 8)
    assert (first.max_num_workers, other.max_num_workers) == (2, 1), "of three groups that may wait"
    assert first.mixture == other.mixture == {}
    assert other.wandb_name == f"{first.wandb_name}-reverse_text"
    alone = run_config.resolve_run_config("arithmetic", "embedded", {})
    assert alone.build_environment_configs() == {"arithmetic": alone}


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"arithmetic": {}}, "env.mixture names arithmetic, which is the run's first environment"),
        ({"b": {"weight": 0}}, "env.mixture.b.weight is 0; allowed: above 0, at most 1000"),
        ({"b": {"weight": "much"}}, "env.mixture.b.weight is 'much'"),
        ({"b": {"weight": float("nan")}}, "env.mixture.b.weight is nan"),
        ({"b": {"group_size": 4}}, "env.mixture.b sets group_size, which all environments of a"),
        ({"b": {"max_token_length": 99999}}, "env.mixture.b: env.max_token_length"),
        ({"a b": {}, "a-b": {}}, "names that differ in punctuation only"),
    ],
)
def test_a_mixture_that_cannot_work_cannot_be_built(others, said):
    with pytest.raises(ConfigError) as caught:
        resolved(**others)
    assert said in str(caught.value)


def test_further_environments_are_checked_as_the_first_one_is():
    found = mixture.check_mixture(
        "embedded", {"reverse_text": {"weight": 2.0}}, lookup.SCHEMA_TIMEOUT_S
    )["reverse_text"]
    assert found.pop("weight") == 2.0
    assert found
    assert not found.keys() & {"group_size", "tokenizer_name"}
    for values, kind in (
        ({"nonsense": {}}, UnknownEnvironmentError),
        ({"reverse_text": {"colour": 1}}, UnknownFieldError),
        ({"arithmetic": {"largest": 0}}, FieldValueError),
    ):
        with pytest.raises(kind):
            mixture.check_mixture("embedded", values, lookup.SCHEMA_TIMEOUT_S)


def test_an_agent_edits_it_like_any_field(clean_environment):
    store = RunStore(clean_environment)
    launch, field, value = edit_launch(
        store,
        LaunchSpec(environment="arithmetic", by_agent=True),
        "mixture",
        {"reverse_text": {"weight": 0.5}},
    )
    assert (field.section, value) == ("env", {"reverse_text": {"weight": 0.5}})
    resolved = resolve_launch(store, launch)
    environment, config = resolved.environment, resolved.config
    assert config.build_environment_configs()["reverse_text"].env.model_extra, (
        "with the fields of its own"
    )
    assert list(mixture.list_environment_files(environment, config)) == [
        "arithmetic",
        "reverse_text",
    ]
    with pytest.raises(UnknownEnvironmentError, match="there is no environment 'reverse'"):
        edit_launch(
            store, LaunchSpec(environment="arithmetic", by_agent=True), "mixture", {"reverse": {}}
        )
