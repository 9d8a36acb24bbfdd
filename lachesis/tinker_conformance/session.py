"""Use a Tinker server as the trainer does, for probes of its answer to each request."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tinker

from lachesis.base.arrays import Array
from lachesis.base.tinker_client import open_service_client, wait_for_sdk
from lachesis.tinker_conformance.answer_shape import (
    check_loss_output,
    check_prompt_logprobs,
    check_samples,
)
from lachesis.trainer.sdk_data import make_datum

RANK, SEED = 8, 1
# Ids that every vocabulary has; what they mean does not matter.
TEXT = list(range(5, 21))
# A rate at which a few updates change log-probabilities by tenths of a nat.
LEARNING_RATE = 5e-3
NUM_UPDATES = 3
# A rate at which the change is still proportional to it.
FIRST_LEARNING_RATE = 3e-4


@dataclass
class BackendSession:
    """Hold a session with the server that is probed, and one adapter in training."""

    service_client: tinker.ServiceClient
    model: str
    training: tinker.TrainingClient | None = None

    def make_adapter(self, rank: int = RANK) -> tinker.TrainingClient:
        """Return the training client of a new adapter."""
        adapter: tinker.TrainingClient = wait_for_sdk(
            self.service_client.create_lora_training_client(
                base_model=self.model, rank=rank, seed=SEED
            )
        )
        return adapter

    def get_adapter(self) -> tinker.TrainingClient:
        """Return the adapter that the probes train, which is made at the first call."""
        if self.training is None:
            self.training = self.make_adapter()
        return self.training

    def sample_base(self) -> tinker.SamplingClient:
        """Return a sampling client of the base model."""
        client: tinker.SamplingClient = wait_for_sdk(
            self.service_client.create_sampling_client(base_model=self.model)
        )
        return client

    def publish(self, adapter: tinker.TrainingClient) -> tinker.SamplingClient:
        """Return a sampling client of the adapter as it is now."""
        client: tinker.SamplingClient = wait_for_sdk(adapter.save_weights_and_get_sampling_client())
        return client

    def load(self, state: str) -> tinker.TrainingClient:
        """Return the training client of a saved state with its optimizer."""
        adapter: tinker.TrainingClient = wait_for_sdk(
            self.service_client.create_training_client_from_state_with_optimizer(state)
        )
        return adapter

    def compute_logprobs(self, client: tinker.SamplingClient) -> Array:
        """Return the sampler's log-probabilities of the text without the first token, (T - 1,)."""
        prompt = tinker.ModelInput.from_ints(TEXT)
        logprobs = check_prompt_logprobs(client.compute_logprobs(prompt).result(), len(TEXT))
        return np.asarray(logprobs[1:], np.float64)

    def compute_training_logprobs(self, adapter: tinker.TrainingClient) -> Array:
        """Return the trainer's log-probabilities of the text without the first token, (T - 1,)."""
        output = adapter.forward([make_text_datum(weight=0.0)], "cross_entropy").result()
        check_loss_output(output, [len(TEXT) - 1])
        return np.asarray(output.loss_fn_outputs[0]["logprobs"].to_numpy(), np.float64)

    def train(
        self, adapter: tinker.TrainingClient, *, num_updates: int = NUM_UPDATES, **adam: float
    ) -> None:
        """Take supervised steps on the text."""
        parameters = tinker.AdamParams(**{"learning_rate": LEARNING_RATE, **adam})
        for _ in range(num_updates):
            output = adapter.forward_backward([make_text_datum()], "cross_entropy").result()
            adapter.optim_step(parameters).result()
            check_loss_output(output, [len(TEXT) - 1])

    def measure_first_change(self, rank: int) -> float:
        """Return by how much the first update of a new adapter changes the text, in nats."""
        adapter = self.make_adapter(rank)
        before = self.compute_training_logprobs(adapter)
        self.train(adapter, num_updates=1, learning_rate=FIRST_LEARNING_RATE)
        after = self.compute_training_logprobs(adapter)
        return float(np.abs(after - before).mean())

    def read_end_ids(self) -> set[int]:
        """Return the ids of the tokens that end an answer, from the tokenizer of the model."""
        tokenizer: Any = self.get_adapter().get_tokenizer()
        return {int(tokenizer.eos_token_id)}

    def sample(
        self, client: tinker.SamplingClient, *, num_samples: int = 1, **parameters: Any
    ) -> list[Any]:
        """Return continuations of the session's fixed text by a sampling client."""
        answer = client.sample(
            tinker.ModelInput.from_ints(TEXT),
            num_samples,
            tinker.SamplingParams(**{"max_tokens": 8, "stop": [], **parameters}),
        ).result()
        check_samples(answer.sequences, num_samples)
        return list(answer.sequences)


@contextlib.contextmanager
def open_backend_session(model: str) -> Iterator[BackendSession]:
    """Open a session with the server of TINKER_BASE_URL during the block."""
    with open_service_client(user_metadata={"created_by": "lachesis backend check"}) as client:
        yield BackendSession(client, model)


def make_text_datum(weight: float = 1.0) -> tinker.Datum:
    """Return a datum that trains every token of the text but the first with this weight."""
    return make_datum(
        np.asarray(TEXT[:-1]),
        targets=np.asarray(TEXT[1:]),
        weights=np.full(len(TEXT) - 1, weight, np.float32),
    )


def make_policy_datum(logprobs: Array) -> tinker.Datum:
    """Return a datum of the text as a rollout with the advantage 1, as the trainer sends it."""
    return make_datum(
        np.asarray(TEXT[:-1]),
        targets=np.asarray(TEXT[1:]),
        logprobs=logprobs.astype(np.float32),
        advantages=np.ones(len(TEXT) - 1, np.float32),
    )


def make_checkpoint_name() -> str:
    """Return a name that no earlier probe has used."""
    return f"lachesis-probe-{time.time_ns():x}"
