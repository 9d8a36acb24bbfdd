"""Train a model through the Tinker SDK: update steps, new sampling weights, checkpoints."""

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tinker
from tinker.lib.base_url import resolve_base_url

from lachesis.base.arrays import Array
from lachesis.base.errors import (
    CheckpointError,
    LachesisError,
    MissingKeyError,
    ModelNotFoundError,
    ServerDownError,
    shorten,
)
from lachesis.base.files import write_private
from lachesis.base.tinker_client import call_sdk, end_session, make_access_error, make_rest_client
from lachesis.config.run_config import RunConfig
from lachesis.inference_server.token_usage import Usage
from lachesis.tinker_conformance.answer_shape import (
    LOSS_SUM,
    check_loss_output,
    check_prompt_logprobs,
)
from lachesis.trainer.batch.group_to_datums import Batch
from lachesis.trainer.loss_metrics import RATIO_BOUNDS, compute_loss_metrics
from lachesis.trainer.sdk_data import make_datum, to_data, to_prompts, to_sft_data
from lachesis.trainer.sdk_listener import install_listener
from lachesis.trainer.sft_examples import SftExample
from lachesis.trainer.tinker_outages import ServerWatch

log = logging.getLogger(__name__)
ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
# How long to try to delete the parts of a failed save, because the server itself may be gone.
DISCARD_TIMEOUT_S = 5.0
# How long a checkpoint with a time to live is kept from its last renewal on.
KEEP_S = 30 * 86_400


class Policy:
    """Wrap the SDK's clients of one model; create one with `create` or `for_sampling`."""

    def __init__(
        self,
        service_client: tinker.ServiceClient,
        training_client: tinker.TrainingClient | None,
        config: RunConfig,
    ) -> None:
        self.service_client, self._training_client, self.config = (
            service_client,
            training_client,
            config,
        )
        self.sampler: tinker.SamplingClient | None = None
        self.base_sampler: tinker.SamplingClient | None = None
        # Number of updates that `train` has made.
        self.num_updates = 0
        # Counts what the requests of this object cost; the trainer sets the run's own.
        self.usage = Usage()
        self.watch: ServerWatch | None = None
        # Whether an update has begun whose outcome is unknown, also after an error during it.
        self.is_update_under_way = False
        self._rest_client: tinker.RestClient | None = None
        self._session_file: Path | None = None

    @classmethod
    async def create(
        cls, config: RunConfig, *, resume_from: str | None, watch: ServerWatch | None = None
    ) -> "Policy":
        """Create a policy with a new adapter, or with that of a state path and its optimizer.

        `watch` is told what the SDK waits out.

        Raises:
            MissingKeyError: The key is missing or refused.
            BillingError: The account cannot pay.
            ModelNotFoundError: The server does not offer the model.
            ServerDownError: The server does not respond.
            CheckpointError: The state cannot be loaded.
        """
        with _translate_sdk_errors(config.openai.model_name, resume_from):
            service_client = tinker.ServiceClient(
                user_metadata={"run": config.env.wandb_name or ""}
            )
            if watch is not None:
                await asyncio.to_thread(install_listener, service_client, watch.report)
            if resume_from:
                training_client = await call_sdk(
                    service_client, "create_training_client_from_state_with_optimizer", resume_from
                )
            else:
                training_client = await call_sdk(
                    service_client,
                    "create_lora_training_client",
                    base_model=config.openai.model_name,
                    rank=config.tinker.lora_rank,
                    seed=config.tinker.seed,
                )
            policy = cls(service_client, training_client, config)
            policy.watch = watch
            policy.base_sampler = await call_sdk(
                service_client, "create_sampling_client", base_model=config.openai.model_name
            )
            policy._rest_client = await asyncio.to_thread(make_rest_client, service_client)
        return policy

    @classmethod
    async def for_sampling(cls, config: RunConfig, weights: str | None = None) -> "Policy":
        """Create a policy for sampling only; it cannot be trained or saved.

        Args:
            config: The configuration, which names the base model.
            weights: The path of sampler weights; None for the base model.

        Raises:
            CheckpointError: The weights cannot be loaded.
            ServerDownError: The server does not respond.
        """
        with _translate_sdk_errors(config.openai.model_name, weights):
            service_client = tinker.ServiceClient()
            base_sampler = await call_sdk(
                service_client, "create_sampling_client", base_model=config.openai.model_name
            )
            sampler = base_sampler
            if weights:
                sampler = await call_sdk(
                    service_client, "create_sampling_client", model_path=weights
                )
        policy = cls(service_client, None, config)
        policy.base_sampler, policy.sampler = base_sampler, sampler
        return policy

    @property
    def training_client(self) -> tinker.TrainingClient:
        """Return the client of the model in training."""
        assert self._training_client is not None, "this policy is the base model alone"
        return self._training_client

    async def train(
        self,
        batch: Batch,
        learning_rate: float,
        set_waiting_for: Callable[[str], None] = lambda what: None,
    ) -> dict[str, float]:
        """Take one step on a batch and publish new weights; return the metrics.

        All requests are queued before the first result is awaited. The weights do not change if the
        batch has no datum.

        Args:
            batch: The datums of the step.
            learning_rate: Adam's learning rate for this step.
            set_waiting_for: Called with the name of each operation that is awaited.
        """
        metrics = {"train/learning_rate": learning_rate}
        if not batch.datums:
            return metrics
        data = await asyncio.to_thread(to_data, batch, self.loss_fn)
        set_waiting_for("forward_backward")
        started_at = time.monotonic()
        self.is_update_under_way = True
        forward_future = self.training_client.forward_backward(
            data, self.loss_fn, self._build_loss_config()
        )
        # Queued before the gradients exist: the server works on both without waiting for this
        # client.
        optim_future = self._queue_optim_step(learning_rate)
        publish_task = asyncio.ensure_future(
            call_sdk(self.training_client, "save_weights_and_get_sampling_client")
        )
        try:
            output = await forward_future.result_async()
            set_waiting_for("optim_step")
            forward_done_at = time.monotonic()
            optim_output = await optim_future.result_async()
            self.num_updates, self.is_update_under_way = self.num_updates + 1, False
            set_waiting_for("sampler")
            optim_done_at = time.monotonic()
            # From here on environments sample the new weights; requests in flight finish with those
            # they began with.
            self.sampler = await publish_task
        finally:
            publish_task.cancel()
        return {
            **metrics,
            **self._compute_loss_metrics(batch, output),
            **_rename_optimizer_metrics(optim_output.metrics),
            "time/forward_backward": forward_done_at - started_at,
            "time/optim_step": optim_done_at - forward_done_at,
            "time/publish": time.monotonic() - optim_done_at,
        }

    def _compute_loss_metrics(
        self, batch: Batch, output: tinker.ForwardBackwardOutput
    ) -> dict[str, float]:
        """Return the metrics of an update from its losses and log-probabilities."""
        check_loss_output(output, [len(datum.targets) for datum in batch.datums])
        training_logprobs_D = [
            np.asarray(loss_output["logprobs"].to_numpy(), np.float64)
            for loss_output in output.loss_fn_outputs
        ]
        batch.training_logprobs_D = training_logprobs_D
        loss_sum = float(output.metrics[LOSS_SUM])
        return compute_loss_metrics(batch, training_logprobs_D, loss_sum, self.config)

    @property
    def loss_fn(self) -> str:
        """Return the name of the loss."""
        return self.config.effective_loss

    def _build_loss_config(self) -> dict[str, float] | None:
        """Return the clip bounds of the configuration for a loss that has any, else None."""
        tinker_config = self.config.tinker
        bounds = {
            "clip_low_threshold": tinker_config.clip_low_threshold,
            "clip_high_threshold": tinker_config.clip_high_threshold,
        }
        if self.loss_fn not in RATIO_BOUNDS:
            return None
        return {name: value for name, value in bounds.items() if value is not None} or None

    def _queue_optim_step(self, learning_rate: float) -> tinker.APIFuture[tinker.OptimStepResponse]:
        clip = self.config.tinker.grad_clip_norm
        return self.training_client.optim_step(
            tinker.AdamParams(learning_rate=learning_rate, grad_clip_norm=clip, **ADAM)
        )

    async def fine_tune_on_examples(
        self, examples: Sequence[SftExample], learning_rate: float
    ) -> float:
        """Take one supervised step and return the mean loss per token before it, in nats.

        Every token of the batch counts the same.
        """
        data = await asyncio.to_thread(to_sft_data, examples)
        forward_future = self.training_client.forward_backward(data, "cross_entropy")
        optim_future = self._queue_optim_step(learning_rate)
        output = await forward_future.result_async()
        await optim_future.result_async()
        check_loss_output(output, [len(example.targets) for example in examples])
        return float(output.metrics[LOSS_SUM])

    async def compute_base_logprobs(self, batch: Batch) -> list[Array]:
        """Return the base model's log-probabilities of each datum's trained tokens."""
        assert self.base_sampler is not None
        prompts = await asyncio.to_thread(to_prompts, batch)
        logprob_lists = await asyncio.gather(
            *(self.request_logprobs(self.base_sampler, prompt) for prompt in prompts)
        )
        return [
            np.asarray(logprobs[1:], np.float64)[datum.loss_mask]
            for logprobs, datum in zip(logprob_lists, batch.datums, strict=True)
        ]

    async def request_logprobs(
        self, sampler: tinker.SamplingClient, prompt: tinker.ModelInput
    ) -> list[float | None]:
        """Return the log-probability of each token, None for the first, and count the tokens."""
        self.usage.record_logprob_request(prompt.length)
        logprobs = await call_sdk(sampler, "compute_logprobs", prompt)
        return check_prompt_logprobs(logprobs, prompt.length)

    async def compute_logprobs(self, tokens: Sequence[int]) -> Array:
        """Return the log-probability of each token except the first under the model in training."""
        self.usage.prefill += len(tokens) - 1
        datum = make_datum(
            np.asarray(tokens[:-1]),
            targets=np.asarray(tokens[1:]),
            weights=np.zeros(len(tokens) - 1, np.float32),
        )
        forward_future = self.training_client.forward([datum], "cross_entropy")
        output = await forward_future.result_async()
        check_loss_output(output, [len(tokens) - 1])
        return np.asarray(output.loss_fn_outputs[0]["logprobs"].to_numpy(), np.float64)

    async def publish(self) -> None:
        """Publish weights without a step, such as the initial ones."""
        self.sampler = await call_sdk(self.training_client, "save_weights_and_get_sampling_client")

    async def save(self, name: str) -> dict[str, str]:
        """Save the state (weights and optimizer) and the sampler weights, and return their paths by
        kind.

        Every call uses new names, because a server refuses the names of a save that failed
        half-way. If one part fails, the other one is deleted, and the server's error is raised.
        """
        name = f"{name}-{secrets.token_hex(3)}"
        state_future = self.training_client.save_state(f"{name}-state", overwrite=True)
        weights_future = self.training_client.save_weights_for_sampler(f"{name}-sampler")
        results = await asyncio.gather(
            state_future.result_async(), weights_future.result_async(), return_exceptions=True
        )
        outcomes: list[Any] = list(results)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures:
            await self.discard(
                [outcome.path for outcome in outcomes if not isinstance(outcome, BaseException)]
            )
            raise failures[0]
        return {"state": outcomes[0].path, "sampler_weights": outcomes[1].path}

    async def discard(self, paths: Iterable[str], timeout_s: float = DISCARD_TIMEOUT_S) -> None:
        """Delete checkpoints from the server, and log those that cannot be deleted."""
        for path in paths:
            try:
                async with asyncio.timeout(timeout_s):
                    await self.delete(path)
            except Exception as error:
                log.warning("%s is still on the server: %r", path, error)

    async def renew(self, path: str) -> str | None:
        """Let a checkpoint live for another `KEEP_S` seconds if the server would delete it.

        Returns:
            When it will be deleted, in ISO 8601; None if it is kept for ever.
        """
        assert self._rest_client is not None, "this policy is the base model alone"
        run_id = path.removeprefix("tinker://").split("/")[0]
        listed = await call_sdk(self._rest_client, "list_checkpoints", run_id)
        entry = next((one for one in listed.checkpoints if one.tinker_path == path), None)
        if entry is None or entry.expires_at is None:
            return None
        await call_sdk(self._rest_client, "set_checkpoint_ttl_from_tinker_path", path, KEEP_S)
        return (datetime.now(UTC) + timedelta(seconds=KEEP_S)).isoformat(timespec="seconds")

    async def delete(self, path: str) -> None:
        """Delete a checkpoint from the server."""
        assert self._rest_client is not None, "this policy is the base model alone"
        await call_sdk(self._rest_client, "delete_checkpoint_from_tinker_path", path)

    def write_session_file(self, file: Path) -> None:
        """Store the id of the session, so that it can be ended if this process cannot do it.

        Raises:
            StorageError: The file cannot be written.
        """
        write_private(
            file,
            json.dumps(
                {"id": self.service_client.holder.get_session_id(), "url": resolve_base_url()}
            ),
        )
        self._session_file = file

    async def close(self, status: Literal["success", "errored", "interrupted"]) -> None:
        """End the session, which frees its memory on the server."""
        # A server that is gone holds nothing that has to be freed.
        with contextlib.suppress(TimeoutError, tinker.TinkerError, LachesisError):
            async with asyncio.timeout(5):
                await end_session(self.service_client, status)
            if self._session_file is not None:
                self._session_file.unlink(missing_ok=True)


@contextlib.contextmanager
def _translate_sdk_errors(model: str, resume_from: str | None = None) -> Iterator[None]:
    """Translate the SDK's errors during the creation of clients to errors of this project."""
    try:
        yield
    except tinker.APIStatusError as error:
        if error.status_code in (401, 402, 403):
            raise make_access_error(
                error.status_code, shorten(error.message, 200), resolve_base_url()
            ) from error
        if not resume_from and error.status_code in (400, 404):
            raise ModelNotFoundError(
                f"the Tinker server does not train {model} ({shorten(error.message, 200)}); "
                "`lachesis model list` lists what it offers now"
            ) from error
        if resume_from:
            raise CheckpointError(
                f"training cannot continue from {resume_from}: {error}"
            ) from error
        raise
    except tinker.APIConnectionError as error:
        raise ServerDownError(f"the Tinker server does not answer: {error}") from error
    except (tinker.TinkerError, ValueError) as error:
        if type(error) is tinker.TinkerError:  # Its subclasses are errors of the server.
            raise MissingKeyError(f"the Tinker client refuses its key: {error}") from error
        if resume_from:
            raise CheckpointError(
                f"training cannot continue from {resume_from}: {error}"
            ) from error
        raise


def _rename_optimizer_metrics(metrics: dict[str, float] | None) -> dict[str, float]:
    return {f"optim/{key.split(':')[0]}": value for key, value in (metrics or {}).items()}
