"""The model in training, through the Tinker SDK: train steps, fresh sampling weights, checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import tinker
from tinker.lib.base_url import resolve_base_url

from lachesis.config import RunConfig
from lachesis.errors import CheckpointError, MissingKeyError, ServerDownError
from lachesis.runs import write_private
from lachesis.trainer.batch import Array, Batch, spread

ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


class Policy:
    """Make one with `create`."""

    def __init__(self, service: tinker.ServiceClient, training: tinker.TrainingClient | None, config: RunConfig) -> None:
        self.service, self._training, self.config = service, training, config
        self.sampler: tinker.SamplingClient | None = None
        self.base: tinker.SamplingClient | None = None
        self._rest: tinker.RestClient | None = None
        self._note: Path | None = None

    @classmethod
    async def create(cls, config: RunConfig, *, resume_from: str | None) -> Policy:
        """A fresh adapter, or one that continues from a state path with its optimizer.

        Raises MissingKeyError, ServerDownError, or CheckpointError when the state cannot be loaded.
        """
        with _told(resume_from):
            service = tinker.ServiceClient(user_metadata={"run": config.env.wandb_name or ""})
            if resume_from:
                training = await service.create_training_client_from_state_with_optimizer_async(resume_from)
            else:
                training = await service.create_lora_training_client_async(
                    base_model=config.openai.model_name, rank=config.tinker.lora_rank, seed=config.tinker.seed
                )
            policy = cls(service, training, config)
            policy.base = await service.create_sampling_client_async(base_model=config.openai.model_name)
            policy._rest = await asyncio.to_thread(tinker.RestClient, base_url=resolve_base_url())  # asks, and blocks meanwhile
        return policy

    @classmethod
    async def of_base_model(cls, config: RunConfig) -> Policy:
        """The base model for sampling alone; there is nothing to train or save. Raises as `create` does."""
        with _told():
            service = tinker.ServiceClient()
            base = await service.create_sampling_client_async(base_model=config.openai.model_name)
        policy = cls(service, None, config)
        policy.base = policy.sampler = base
        return policy

    @property
    def training(self) -> tinker.TrainingClient:
        assert self._training is not None, "this policy is the base model alone"
        return self._training

    async def train(self, batch: Batch, waiting_for: Callable[[str], None] = lambda what: None) -> dict[str, float]:
        """One step on the batch: both requests are queued before either is waited for. Returns the contract's metrics; the
        weights stay when the batch holds no datum. `waiting_for` is told what is waited for."""
        if not batch.datums:
            return {"train/learning_rate": self.config.tinker.learning_rate}
        data = [
            tinker.Datum(
                model_input=tinker.ModelInput.from_ints(datum.tokens.tolist()),
                loss_fn_inputs={
                    "target_tokens": tinker.TensorData.from_numpy(datum.targets),
                    "logprobs": tinker.TensorData.from_numpy(datum.logprobs),
                    "advantages": tinker.TensorData.from_numpy(datum.advantages),
                },
            )
            for datum in batch.datums
        ]
        adam = tinker.AdamParams(learning_rate=self.config.tinker.learning_rate, **ADAM)
        waiting_for("forward_backward")
        started = time.monotonic()
        forward = await self.training.forward_backward_async(data, self.config.tinker.loss_fn)
        step = await self.training.optim_step_async(adam)
        output = await forward.result_async()
        waiting_for("optim_step")
        passed = time.monotonic()
        stepped = await step.result_async()
        timing = {"time/forward_backward": passed - started, "time/optim_step": time.monotonic() - passed}
        training_D = [np.asarray(one["logprobs"].to_numpy(), np.float64) for one in output.loss_fn_outputs]
        return {**self._loss_metrics(batch, training_D, output.metrics), **_optimizer_metrics(stepped.metrics), **timing}

    def _loss_metrics(self, batch: Batch, training_D: list[Array], metrics: dict[str, float]) -> dict[str, float]:
        training = np.concatenate([one[datum.trained] for one, datum in zip(training_D, batch.datums, strict=True)])
        sampling = batch.trained_values("logprobs")
        return {
            "train/loss": metrics["loss:sum"] / len(training),
            "train/learning_rate": self.config.tinker.learning_rate,
            **spread("logprobs", training, "_training"),
            "logprobs/diff": float((sampling - training).mean()),
            "logprobs/gap": float(np.abs(sampling - training).mean()),
        }

    async def publish(self) -> None:
        """From here environments sample the new weights; requests in flight end on those they began with."""
        self.sampler = await self.training.save_weights_and_get_sampling_client_async()

    async def save(self, name: str) -> dict[str, str]:
        """Write state (weights and optimizer) and sampler weights; their typed paths."""
        state = await self.training.save_state_async(f"{name}-state", overwrite=True)
        weights = await self.training.save_weights_for_sampler_async(f"{name}-sampler")
        return {
            "state": (await state.result_async()).path,
            "sampler_weights": (await weights.result_async()).path,
        }

    async def delete(self, path: str) -> None:
        """Remove a checkpoint from the server."""
        assert self._rest is not None, "this policy is the base model alone"
        await self._rest.delete_checkpoint_from_tinker_path(path)

    def note_session(self, file: Path) -> None:
        """Keep where the session is, so that it can be ended when this process cannot do it. Raises StorageError."""
        write_private(file, json.dumps({"id": self.service.holder.get_session_id(), "url": resolve_base_url()}))
        self._note = file

    async def close(self, status: Literal["success", "errored", "interrupted"]) -> None:
        """End the session, which frees what it holds on the server."""
        with contextlib.suppress(TimeoutError, tinker.TinkerError):  # a server that is gone has freed everything
            async with asyncio.timeout(5):
                await self.service.close(status)
            if self._note is not None:
                self._note.unlink(missing_ok=True)


@contextlib.contextmanager
def _told(resume_from: str | None = None) -> Iterator[None]:
    """The SDK's errors while clients are made, in our words."""
    try:
        yield
    except tinker.APIConnectionError as error:
        raise ServerDownError(f"the Tinker server does not answer: {error}") from error
    except (tinker.TinkerError, ValueError) as error:
        if type(error) is tinker.TinkerError:  # the SDK's own subclasses come from the server
            raise MissingKeyError(f"the Tinker client refuses its key: {error}") from error
        if resume_from:
            raise CheckpointError(f"training cannot continue from {resume_from}: {error}") from error
        raise


def _optimizer_metrics(metrics: dict[str, float] | None) -> dict[str, float]:
    return {f"optim/{key.split(':')[0]}": value for key, value in (metrics or {}).items()}
