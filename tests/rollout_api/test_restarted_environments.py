"""Batches go on being formed while environments of a mixture are killed and restarted."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
from atroposlib.api.utils import grab_exact_from_heterogeneous_queue

from lachesis.base.json_text import Json
from lachesis.rollout_api.routes import BoundedRolloutServer

GROUP_SIZE = 8
BATCH_SIZE = 24


class SimulatedMixture:
    """Simulate environments that ask the API whether they should make a group, as Atropos does.

    The queue, its order and the size that an environment is told are those of the real server.
    """

    def __init__(self, weights, max_offpolicy_batches):
        self.weights, self.max_offpolicy_batches = weights, max_offpolicy_batches
        self.state: Any = SimpleNamespace(batchsize=BATCH_SIZE, queue=[], curr_batch=[], envs=[])
        self.server = BoundedRolloutServer(
            SimpleNamespace(state=self.state),
            max_waiting_batches=max_offpolicy_batches,
            num_environments=len(weights),
        )
        self.living: dict[int, Json] = {}
        for index in range(len(weights)):
            self.register(index)

    def register(self, index):
        """Register a process for the environment at this index of `weights`."""
        env = {
            "registered_id": len(self.state.envs),
            "weight": self.weights[index],
            "group_size": GROUP_SIZE,
            "connected": True,
            "desired_name": f"environment{index}",
        }
        self.state.envs.append(env)
        self.living[index] = env

    def make_group_if_asked(self, index):
        """Let one living environment send a group, unless it is told that the queue is full."""
        env = self.living.get(index)
        if env is None:
            return
        limit = self.max_offpolicy_batches * BATCH_SIZE // GROUP_SIZE
        if self.server._compute_queue_size(env) // GROUP_SIZE < limit:
            group = {"env_id": env["registered_id"], "tokens": [[1]] * GROUP_SIZE}
            self.state.queue.append(group)
            self.server._drop_oldest_groups()

    def take_batch(self):
        """Take one batch as `GET /batch` does; return False if there is none."""
        self.server._arrange_queue()
        batch, self.state.queue = grab_exact_from_heterogeneous_queue(
            self.state.queue, self.state.batchsize
        )
        return batch is not None


@pytest.mark.parametrize("max_offpolicy_batches", [1, 2])
@pytest.mark.parametrize("weights", [[1.0, 0.5], [1.0, 0.5, 0.25]])
def test_a_batch_is_always_formed(weights, max_offpolicy_batches):
    for seed in range(250):
        chance = random.Random(seed)
        mixture = SimulatedMixture(weights, max_offpolicy_batches)
        train_for_a_while(mixture, chance, num_turns=chance.randrange(1, 40))
        dead = list(mixture.living.values())
        mixture.living = {}
        for index in chance.sample(range(len(weights)), len(weights)):
            mixture.register(index)
            train_for_a_while(mixture, chance, num_turns=chance.randrange(3))
            dead[index]["connected"] = False
            train_for_a_while(mixture, chance, num_turns=chance.randrange(3))
        num_batches = 0
        for turn in range(120):
            mixture.make_group_if_asked(turn % len(weights))
            num_batches += mixture.take_batch()
        assert num_batches >= 5, f"seed {seed}: {num_batches} batches in 120 turns"


def train_for_a_while(mixture, chance, *, num_turns):
    """Let environments make groups in a random order, and a trainer take batches now and then."""
    for _ in range(num_turns):
        mixture.make_group_if_asked(chance.randrange(len(mixture.weights)))
        if chance.random() < 0.7:
            mixture.take_batch()
