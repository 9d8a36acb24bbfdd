"""The model in training, through the Tinker SDK: train steps, fresh sampling weights, checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import tinker
from tinker.lib.base_url import resolve_base_url

from lachesis.config import RunConfig
from lachesis.errors import CheckpointError, MissingKeyError, ServerDownError
from lachesis.files import write_private
from lachesis.trainer.batch import Array, Batch, Datum, spread
from lachesis.trainer.supervised import Example

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

    async def train(
        self, batch: Batch, learning_rate: float, waiting_for: Callable[[str], None] = lambda what: None
    ) -> dict[str, float]:
        """One step on the batch, and new weights for the environments: all requests are queued before the first is waited for.
        Returns the contract's metrics; the weights stay when the batch holds no datum. `waiting_for` is told what is waited
        for."""
        known = {"train/learning_rate": learning_rate}
        if not batch.datums:
            return known
        data = [_datum(datum.tokens, targets=datum.targets, **_of_samples(datum)) for datum in batch.datums]
        if self.loss_fn == "gspo":
            for datum, own in zip(data, batch.datums, strict=True):
                datum.loss_fn_inputs["sequence_ratio_mask"] = _tensor(own.trained.astype(np.float32))
        waiting_for("forward_backward")
        started = time.monotonic()
        forward = await self.training.forward_backward_async(data, self.loss_fn, self._loss_config())
        step = await self._queue_step(learning_rate)
        published = asyncio.ensure_future(self.training.save_weights_and_get_sampling_client_async())
        try:
            output = await forward.result_async()
            waiting_for("optim_step")
            passed = time.monotonic()
            stepped = await step.result_async()
            waiting_for("sampler")
            ended = time.monotonic()
            # From here environments sample the new weights; requests in flight end on those they began with.
            self.sampler = await published
        finally:
            published.cancel()
        timing = {
            "time/forward_backward": passed - started,
            "time/optim_step": ended - passed,
            "time/publish": time.monotonic() - ended,
        }
        training_D = [np.asarray(one["logprobs"].to_numpy(), np.float64) for one in output.loss_fn_outputs]
        found = loss_metrics(batch, training_D, float(output.metrics["loss:sum"]), self.config)
        return {**known, **found, **_optimizer_metrics(stepped.metrics), **timing}

    @property
    def loss_fn(self) -> str:
        """Batches that may wait are off-policy by several updates; then the ratio is bounded."""
        chosen = self.config.tinker.loss_fn
        if chosen != "auto":
            return chosen
        return "ppo" if self.config.env.max_batches_offpolicy > 1 else "importance_sampling"

    def _loss_config(self) -> dict[str, float] | None:
        tinker_ = self.config.tinker
        bounds = {"clip_low_threshold": tinker_.clip_low_threshold, "clip_high_threshold": tinker_.clip_high_threshold}
        if self.loss_fn not in ("ppo", "cispo", "gspo"):
            return None
        return {name: value for name, value in bounds.items() if value is not None} or None

    async def _queue_step(self, learning_rate: float) -> tinker.APIFuture[tinker.OptimStepResponse]:
        clip = self.config.tinker.grad_clip_norm
        return await self.training.optim_step_async(tinker.AdamParams(learning_rate=learning_rate, grad_clip_norm=clip, **ADAM))

    async def imitate(self, examples: Sequence[Example], learning_rate: float) -> float:
        """One supervised step; the mean loss of a token before it, in nats. Every token of the batch counts the same."""
        count = sum(int(one.trained.sum()) for one in examples)
        data = [_datum(one.tokens, targets=one.targets, weights=(one.trained / count).astype(np.float32)) for one in examples]
        forward = await self.training.forward_backward_async(data, "cross_entropy")
        step = await self._queue_step(learning_rate)
        output = await forward.result_async()
        await step.result_async()
        return float(output.metrics["loss:sum"])

    async def base_logprobs(self, batch: Batch) -> list[Array]:
        """Of the trained tokens of each datum, under the base model."""
        assert self.base is not None
        prompts = [tinker.ModelInput.from_ints([*map(int, datum.tokens), int(datum.targets[-1])]) for datum in batch.datums]
        answers = await asyncio.gather(*(self.base.compute_logprobs_async(prompt) for prompt in prompts))
        return [np.asarray(answer[1:], np.float64)[datum.trained] for answer, datum in zip(answers, batch.datums, strict=True)]

    async def logprobs(self, tokens: Sequence[int]) -> Array:
        """Of each token but the first, by the model in training."""
        datum = _datum(np.asarray(tokens[:-1]), targets=np.asarray(tokens[1:]), weights=np.zeros(len(tokens) - 1, np.float32))
        forward = await self.training.forward_async([datum], "cross_entropy")
        return np.asarray((await forward.result_async()).loss_fn_outputs[0]["logprobs"].to_numpy(), np.float64)

    async def publish(self) -> None:
        """Weights that no step has published: the first ones, or those of a resume."""
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


def loss_metrics(batch: Batch, training_D: list[Array], loss: float, config: RunConfig) -> dict[str, float]:
    """Of one step, from the log-probabilities lp of each datum's targets under the weights that were trained, and q of the
    sampling side:

    train/loss           sum of the loss / trained tokens
    logprobs/diff, gap   mean of q - lp, of |q - lp|
    kl/sampling_train    mean of r - 1 - log r, r = exp(lp - q): KL(sampling || training) in nats per token, the estimate k3,
    which is
                         never negative (Schulman 2020, joschu.net/blog/kl-approx.html)
    entropy/training     -mean of lp, each token weighted by r: the entropy of the weights in training, on samples of the older
    ones loss/clipped_share   share of the tokens whose ratio lies outside the bounds of the loss
    """
    training = np.concatenate([one[datum.trained] for one, datum in zip(training_D, batch.datums, strict=True)])
    sampling = batch.trained_values("logprobs").astype(np.float64)
    moved = np.clip(training - sampling, -20.0, 20.0)
    ratio = np.exp(moved)
    low, high = config.tinker.clip_low_threshold, config.tinker.clip_high_threshold
    outside = (ratio < (0.8 if low is None else low)) | (ratio > (1.2 if high is None else high))
    return {
        "train/loss": loss / len(training),
        **spread("logprobs", training, "_training"),
        "logprobs/diff": float((sampling - training).mean()),
        "logprobs/gap": float(np.abs(sampling - training).mean()),
        "kl/sampling_train": float((ratio - 1 - moved).mean()),
        "entropy/training": float(-(ratio * training).mean()),
        "loss/clipped_share": float(outside.mean()),
    }


def _of_samples(datum: Datum) -> dict[str, Array]:
    return {"logprobs": datum.logprobs, "advantages": datum.advantages}


def _datum(tokens: Array, *, targets: Array, **inputs: Array) -> tinker.Datum:
    tensors = {"target_tokens": _tensor(targets), **{name: _tensor(value) for name, value in inputs.items()}}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens.tolist()), loss_fn_inputs=tensors)


def _tensor(values: Array) -> tinker.TensorData:
    return tinker.TensorData.from_numpy(values)


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
