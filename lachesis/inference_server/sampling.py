"""Sample from the weights in training, for every dialect of the inference server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tinker
from fastapi import Request

from lachesis.base.errors import ConfigError, ServerProtocolError
from lachesis.base.json_text import Json
from lachesis.base.tinker_client import call_sdk
from lachesis.config.run_config import RunConfig
from lachesis.inference_server.sampling_parameters import BadRequestError, SamplingSettings
from lachesis.inference_server.token_usage import Usage
from lachesis.rollout_api.scored_group import collapse_doubled_eos
from lachesis.tinker_conformance.answer_shape import check_prompt_logprobs, check_samples
from lachesis.trainer.trained_model import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Sample:
    """Hold an answer: tokens, log-probabilities, and finish reason `stop` or `length`."""

    tokens: list[int]
    logprobs: list[float]
    stop_reason: str


class Inference:
    """Sample from the policy or from the base model."""

    def __init__(
        self,
        policy: Policy,
        tokenizer: PreTrainedTokenizerBase,
        config: RunConfig,
        usage: Usage,
        *,
        is_base: bool,
    ) -> None:
        self.policy, self.tokenizer, self.config, self.usage, self.is_base = (
            policy,
            tokenizer,
            config,
            usage,
            is_base,
        )
        self.own_stop_ids = _find_stop_ids(tokenizer, config)

    def get_sampling_client(self, request: Request) -> tinker.SamplingClient:
        """Return the weights for a request."""
        if self.is_base:
            client = self.policy.base_sampler
        else:
            client = self.policy.sampler
        assert client is not None, "the server starts after the first weights are published"
        return client

    async def sample(
        self, request: Request, ids: list[int], settings: SamplingSettings
    ) -> list[Sample]:
        """Return `settings.n` samples; stop sampling if the client disconnects.

        An answer ends at a stop text, at a stop id, or at the model's own end; with stop ids alone
        only at those.

        Raises:
            BadRequestError: A setting is not supported.
        """
        settings.require_supported()
        params = tinker.SamplingParams(
            max_tokens=self.config.env.max_token_length
            if settings.max_tokens is None
            else settings.max_tokens,
            temperature=1.0 if settings.temperature is None else settings.temperature,
            top_p=1.0 if settings.top_p is None else settings.top_p,
            top_k=settings.top_k or -1,
            seed=settings.seed,
            # As in OpenAI's API an empty list means the model's own end.
            stop=settings.stop_texts or settings.stop_ids or self.own_stop_ids or None,
        )
        prompt = collapse_doubled_eos(ids, self.tokenizer.eos_token_id)
        # The SDK accepts texts or ids; with texts, the ids are applied here.
        stop_ids = settings.stop_ids if settings.stop_texts else []
        return await self.sample_and_count(request, prompt, settings.n, params, stop_ids)

    async def sample_and_count(
        self,
        request: Request,
        ids: list[int],
        num_samples: int,
        params: tinker.SamplingParams,
        stop_ids: list[int],
    ) -> list[Sample]:
        """Sample, cut the answers at `stop_ids`, and count them with the version of the weights."""
        prompt, version = tinker.ModelInput.from_ints(ids), self.usage.version
        with self.usage.track_request(ids), self.watch_failures():
            response = await cancel_on_disconnect(
                request,
                call_sdk(self.get_sampling_client(request), "sample", prompt, num_samples, params),
            )
            check_samples(response.sequences, num_samples)
        samples = to_samples(response.sequences, stop_ids)
        for sample, sequence in zip(samples, response.sequences, strict=True):
            self.usage.record_sequence(sample.tokens, sample.logprobs, sample.stop_reason, version)
            self.usage.sampled += len(sequence.tokens) - len(sample.tokens)
        return samples

    @contextlib.contextmanager
    def watch_failures(self) -> Iterator[None]:
        """Let the run end when a request fails because of its key, its account or its session."""
        try:
            yield
        except (tinker.TinkerError, ValueError, ServerProtocolError) as error:
            if self.policy.watch is not None:
                self.policy.watch.report_exception(error)
            raise

    async def compute_logprobs(self, request: Request, ids: list[int]) -> list[float | None]:
        """Return the log-probability of each token, None for the first."""
        prompt = tinker.ModelInput.from_ints(ids)
        self.usage.record_logprob_request(len(ids))
        with self.watch_failures():
            logprobs = await cancel_on_disconnect(
                request, call_sdk(self.get_sampling_client(request), "compute_logprobs", prompt)
            )
            return check_prompt_logprobs(logprobs, len(ids))

    def encode_chat(self, messages: list[Json]) -> list[int]:
        """Return the token ids of a conversation."""
        try:
            ids = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
        except Exception as error:  # Templates raise arbitrary exceptions.
            raise BadRequestError(f"the chat template refuses these messages: {error}") from error
        return list(ids)

    def encode(self, prompt: object) -> list[int]:
        """Return the token ids of a prompt."""
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return list(
                self.tokenizer.encode(prompt.encode().decode())
            )  # refuses what is no Unicode, which the tokenizer hides
        if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
            return prompt
        raise BadRequestError("prompt must be one text or one list of token ids")

    def decode(self, tokens: list[int], settings: SamplingSettings) -> str:
        """Return the text of sampled tokens."""
        return str(
            self.tokenizer.decode(
                tokens, skip_special_tokens=settings.skip_special_tokens is not False
            )
        )


def _find_stop_ids(tokenizer: PreTrainedTokenizerBase, config: RunConfig) -> list[int]:
    """Return the ids that end an answer if the run names stop tokens, else nothing.

    Where ids are given, a server stops at these only, so the model's own end is one of them.

    Raises:
        ConfigError: A text is not one token of the model.
    """
    if not config.tinker.stop_tokens:
        return []
    ids = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    for text in config.tinker.stop_tokens:
        encoded = tokenizer.encode(text, add_special_tokens=False)
        if len(encoded) != 1:
            raise ConfigError(
                f"tinker.stop_tokens has {text!r}, which is {len(encoded)} tokens of "
                f"{config.openai.model_name}; allowed: texts of one token each"
            )
        ids.append(int(encoded[0]))
    return list(dict.fromkeys(ids))


def to_samples(
    sequences: Iterable[tinker.types.SampledSequence], stop_ids: list[int]
) -> list[Sample]:
    """Return the server's answers, each up to the first of these ids."""
    return [
        _truncate_at_stop_id(
            Sample(list(sequence.tokens), list(sequence.logprobs or []), sequence.stop_reason),
            stop_ids,
        )
        for sequence in sequences
    ]


def _truncate_at_stop_id(sample: Sample, stop_ids: list[int]) -> Sample:
    """Return the sample up to and including the first of these ids."""
    end = next((index for index, token in enumerate(sample.tokens) if token in stop_ids), None)
    if end is None:
        return sample
    return Sample(sample.tokens[: end + 1], sample.logprobs[: end + 1], "stop")


async def cancel_on_disconnect(request: Request, work: Awaitable[Any]) -> Any:
    """Await `work`, or cancel it when the client has disconnected."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            raise ClientDisconnectedError
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()


class ClientDisconnectedError(Exception):
    """The client has disconnected, so nobody waits for the response."""


async def _wait_for_disconnect(request: Request) -> None:
    while not await request.is_disconnected():  # noqa: ASYNC110 - the server has no event for it
        await asyncio.sleep(0.5)
