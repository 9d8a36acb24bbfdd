"""The HTTP server that environments sample from. Every route answers with the newest published
weights; under `/base` stands the same with the base model, for comparison.

    GET  /health            ready, phase and step of the trainer     GET /wandb_info
    POST /generate          token-exact, the dialects of vLLM (`prompt.prompt_token_ids`) and SGLang (`input_ids`)
    POST /v1/completions  /v1/chat/completions                       as OpenAI
    POST /logprobs          of a given text or token ids
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import tinker
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from lachesis.base import http_errors
from lachesis.config.run_config import RunConfig
from lachesis.config.schema import LimitsSection
from lachesis.runs.budgets import BudgetUsage, find_exceeded_budget
from lachesis.trainer.doubled_eos import collapse_doubled_eos
from lachesis.trainer.evaluations import EvaluationScheduler
from lachesis.trainer.policy import Policy
from lachesis.trainer.sampling_parameters import (
    BadRequestError,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    LogprobsRequest,
    SamplingSettings,
    refuse_unsupported,
)
from lachesis.trainer.usage import Usage

Json = dict[str, Any]


@dataclass
class TrainerState:
    """What the trainer tells about itself."""

    phase: str = "starting"
    step: int = 0
    waiting_for: str = "start"
    """rollouts, forward_backward, optim_step, sampler (new weights), checkpoint, or evaluation
    (after the last step)."""
    waiting_since: float = field(default_factory=time.time)
    """When it began to wait for that, in seconds since 1970."""
    get_spent: Callable[[], Json] = dict
    """Gives tokens, and US dollars where there is a price, over all attempts of the run until now.
    """
    usage: Usage = field(default_factory=Usage)
    evaluations: EvaluationScheduler = field(default_factory=EvaluationScheduler)
    """Held-out evaluations during training."""
    groups: int = 0
    """Received for training, over all attempts."""
    groups_by_environment: dict[str, int] = field(default_factory=dict)
    """Of them those of each environment, where there are several."""
    resume_point: Json | None = None
    """What training went on from; see `lachesis.trainer.checkpoint_manager.Receipt`."""
    wandb_url: str | None = None
    wandb_error: str | None = None

    def set_waiting_for(self, activity: str) -> None:
        self.waiting_for, self.waiting_since = activity, time.time()

    def describe_exceeded_budget(self, limits: LimitsSection) -> str | None:
        """The budget of tokens or money that is used up, in words."""
        spent = self.get_spent()
        return find_exceeded_budget(limits, BudgetUsage(hours=0, **spent)) if spent else None


@dataclass(frozen=True)
class Sample:
    """One answer: its tokens, the log-probability of each, and whether it ended by itself ("stop")
    or was cut ("length").
    """

    tokens: list[int]
    logprobs: list[float]
    stop_reason: str


class Inference:
    """Token ids in, samples out; one for the policy and one for the base model."""

    def __init__(
        self, policy: Policy, tokenizer: Any, config: RunConfig, usage: Usage, *, is_base: bool
    ) -> None:
        self.policy, self.tokenizer, self.config, self.usage, self.is_base = (
            policy,
            tokenizer,
            config,
            usage,
            is_base,
        )

    def get_sampling_client(self, request: Request) -> tinker.SamplingClient:
        """Return the weights that answer a request."""
        client = self.policy.base_sampler if self.is_base else self.policy.sampler
        assert client is not None, "the server starts after the first weights are published"
        return client

    async def sample(
        self, request: Request, ids: list[int], settings: SamplingSettings
    ) -> list[Sample]:
        """Return `want.n` samples, and end the sampling if the client hangs up.

        An answer ends at a stop text, at a stop id, or at the model's own end; with stop ids alone
        only at those. Raises BadRequest for settings that cannot be honoured.
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
            # an empty list means the model's own end, as for OpenAI
            stop=settings.stop_texts or settings.stop_ids or None,
        )
        prompt = collapse_doubled_eos(ids, self.tokenizer.eos_token_id)
        stop_ids = settings.stop_ids if settings.stop_texts else []  # the SDK takes texts or ids
        return await self.sample_and_count(request, prompt, settings.n, params, stop_ids)

    async def sample_and_count(
        self,
        request: Request,
        ids: list[int],
        num_samples: int,
        params: tinker.SamplingParams,
        stop_ids: list[int],
    ) -> list[Sample]:
        """Sample, cut the answers at `stop_ids`, and count what was sampled, with the version of
        the weights it came from.
        """
        prompt, version = tinker.ModelInput.from_ints(ids), self.usage.version
        with self.usage.track_request(ids):
            response = await cancel_on_disconnect(
                request, self.get_sampling_client(request).sample_async(prompt, num_samples, params)
            )
        samples = to_samples(response.sequences, stop_ids)
        for sample, sequence in zip(samples, response.sequences, strict=True):
            self.usage.record_sequence(sample.tokens, sample.logprobs, sample.stop_reason, version)
            self.usage.sampled += len(sequence.tokens) - len(sample.tokens)
        return samples

    async def compute_logprobs(self, request: Request, ids: list[int]) -> list[float | None]:
        prompt = tinker.ModelInput.from_ints(ids)
        return list(
            await cancel_on_disconnect(
                request, self.get_sampling_client(request).compute_logprobs_async(prompt)
            )
        )

    def encode_chat(self, messages: list[Json]) -> list[int]:
        try:
            ids = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
        except Exception as error:  # a template raises whatever its author chose
            raise BadRequestError(f"the chat template refuses these messages: {error}") from error
        return list(ids)

    def encode(self, prompt: Any) -> list[int]:
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
        return str(
            self.tokenizer.decode(
                tokens, skip_special_tokens=settings.skip_special_tokens is not False
            )
        )


def to_samples(
    sequences: Iterable[tinker.types.SampledSequence], stop_ids: list[int]
) -> list[Sample]:
    """Return the answers of the server, each up to the first of these ids."""
    return [
        _truncate_at_stop_id(
            Sample(list(sequence.tokens), list(sequence.logprobs or []), sequence.stop_reason),
            stop_ids,
        )
        for sequence in sequences
    ]


def _truncate_at_stop_id(sample: Sample, stop_ids: list[int]) -> Sample:
    """Return the sample up to the first of these ids, which belongs to it."""
    end = next((index for index, token in enumerate(sample.tokens) if token in stop_ids), None)
    return (
        sample
        if end is None
        else Sample(sample.tokens[: end + 1], sample.logprobs[: end + 1], "stop")
    )


async def cancel_on_disconnect(request: Request, work: Awaitable[Any]) -> Any:
    """Await `work`, or cancel it when the client has gone."""
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
    """Nobody waits for the answer."""


async def _wait_for_disconnect(request: Request) -> None:
    while not await request.is_disconnected():  # noqa: ASYNC110 - the server has no event for it
        await asyncio.sleep(0.5)


def create_app(policy: Policy, tokenizer: Any, config: RunConfig, state: TrainerState) -> FastAPI:
    """The application; it is served once the policy has published its first weights."""
    app = FastAPI(title="Lachesis inference", openapi_url=None)
    for prefix, is_base in (("", False), ("/base", True)):
        app.include_router(
            create_router(
                Inference(policy, tokenizer, config, state.usage, is_base=is_base), state, config
            ),
            prefix=prefix,
        )
    http_errors.add_error_handlers(app)
    app.add_exception_handler(BadRequestError, _make_error_handler(400))
    app.add_exception_handler(ValidationError, _make_error_handler(400))
    app.add_exception_handler(tinker.RequestFailedError, _make_error_handler(400))
    app.add_exception_handler(tinker.TinkerError, _make_error_handler(502))
    app.add_exception_handler(ClientDisconnectedError, _make_error_handler(499))
    return app


def _make_error_handler(status: int) -> Callable[[Request, Exception], Awaitable[JSONResponse]]:
    async def handle_error(request: Request, error: Exception) -> JSONResponse:
        error_type = "invalid_request_error" if status == 400 else "server_error"
        return JSONResponse(
            {"error": {"message": http_errors.escape_surrogates(error), "type": error_type}}, status
        )

    return handle_error


def create_router(inference: Inference, state: TrainerState, config: RunConfig) -> APIRouter:
    """Return the routes that answer with the weights of `inference`."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> Json:
        return {
            "status": "ok",
            "trainer_initialized": True,
            "phase": state.phase,
            "step": state.step,
            "waiting_for": state.waiting_for,
            "since": state.waiting_since,
            "spent": state.get_spent(),
            "over_budget": state.describe_exceeded_budget(config.limits),
            "usage": state.usage.to_json(),
            "total_steps": config.env.total_steps,
            "groups": state.groups,
            "mixture": state.groups_by_environment,
            "resumed": state.resume_point,
            "wandb_url": state.wandb_url,
            "wandb_error": state.wandb_error,
        }

    @router.get("/wandb_info")
    async def wandb_info() -> Json:
        group = config.tinker.wandb_group or config.env.wandb_name
        return {"project": config.tinker.wandb_project, "group": group, "url": state.wandb_url}

    @router.post("/generate", response_model=None)
    async def generate(body: GenerateRequest, request: Request) -> JSONResponse:
        is_sglang = body.input_ids is not None or body.text is not None
        response = await (_generate_sglang if is_sglang else _generate_vllm)(
            inference, body, request
        )
        # made here: FastAPI would look at each of some thousand numbers in Python
        return JSONResponse(response)

    @router.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Json:
        ids = inference.encode(body.prompt)
        samples = await inference.sample(request, ids, body)
        choices = [
            {
                "index": index,
                "text": inference.decode(sample.tokens, body),
                "finish_reason": sample.stop_reason,
                "logprobs": None
                if body.logprobs is None
                else _build_completion_logprobs(inference, sample),
            }
            for index, sample in enumerate(samples)
        ]
        return _build_openai_response("text_completion", config, ids, samples, choices)

    @router.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Json:
        ids = inference.encode_chat(body.messages)
        samples = await inference.sample(request, ids, body.to_settings())
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": inference.decode(sample.tokens, body)},
                "finish_reason": sample.stop_reason,
                "logprobs": _build_chat_logprobs(inference, sample) if body.logprobs else None,
            }
            for index, sample in enumerate(samples)
        ]
        return _build_openai_response("chat.completion", config, ids, samples, choices)

    @router.post("/logprobs")
    async def logprobs(body: LogprobsRequest, request: Request) -> Json:
        refuse_unsupported(body.model_extra or {})
        ids = body.input_ids
        if ids is None:
            ids = (
                inference.encode_chat(body.messages)
                if body.messages
                else inference.encode(body.prompt)
            )
        return {"tokens": ids, "logprobs": await inference.compute_logprobs(request, ids)}

    return router


async def _generate_vllm(inference: Inference, body: GenerateRequest, request: Request) -> Json:
    """Per sample and token one {id: logprob}; the sampled token is the only entry."""
    prompt = body.prompt.get("prompt_token_ids") if isinstance(body.prompt, dict) else body.prompt
    ids = inference.encode(prompt)
    settings = body.to_vllm_settings()
    samples = await inference.sample(request, ids, settings)
    response: Json = {
        "text": [inference.decode(sample.tokens, settings) for sample in samples],
        "token_ids": [sample.tokens for sample in samples],
        "logprobs": [
            [
                [{str(token): logprob}]
                for token, logprob in zip(sample.tokens, sample.logprobs or [], strict=True)
            ]
            for sample in samples
        ],
        "finish_reasons": [sample.stop_reason for sample in samples],
    }
    if body.prompt_logprobs is not None:
        values = await inference.compute_logprobs(request, ids)
        response["prompt_logprobs"] = [
            None if value is None else {str(token): value}
            for token, value in zip(ids, values, strict=True)
        ]
    return response


async def _generate_sglang(
    inference: Inference, body: GenerateRequest, request: Request
) -> Json | list[Json]:
    """One object for n = 1, else a list; per token [logprob, id, text]."""
    ids = body.input_ids if body.input_ids is not None else inference.encode(body.text)
    settings = body.to_sglang_settings()
    responses = []
    for sample in await inference.sample(request, ids, settings):
        entries = [
            [logprob, token, inference.tokenizer.decode([token])]
            for token, logprob in zip(sample.tokens, sample.logprobs or [], strict=True)
        ]
        meta = {
            "output_token_logprobs": entries,
            "finish_reason": {"type": sample.stop_reason},
            "prompt_tokens": len(ids),
            "completion_tokens": len(sample.tokens),
        }
        responses.append(
            {
                "text": inference.decode(sample.tokens, settings),
                "output_ids": sample.tokens,
                "meta_info": meta,
            }
        )
    return responses[0] if settings.n == 1 else responses


def _build_completion_logprobs(inference: Inference, sample: Sample) -> Json:
    """Return the log-probabilities of the sampled tokens, and of no others, as OpenAI's completions
    do.
    """
    texts = [inference.tokenizer.decode([token]) for token in sample.tokens]
    offsets = list(itertools.accumulate(map(len, texts), initial=0))[:-1]
    return {
        "tokens": texts,
        "token_logprobs": sample.logprobs,
        "top_logprobs": None,
        "text_offset": offsets,
    }


def _build_chat_logprobs(inference: Inference, sample: Sample) -> Json:
    """Return the log-probabilities of the sampled tokens, and of no others, as OpenAI's chat
    completions do.
    """
    texts = [inference.tokenizer.decode([token]) for token in sample.tokens]
    pairs = zip(texts, sample.logprobs, strict=True)
    content = [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in pairs
    ]
    return {"content": content, "refusal": None}


def _build_openai_response(
    object_type: str, config: RunConfig, ids: list[int], samples: list[Any], choices: list[Json]
) -> Json:
    generated = sum(len(sample.tokens) for sample in samples)
    usage = {
        "prompt_tokens": len(ids),
        "completion_tokens": generated,
        "total_tokens": len(ids) + generated,
    }
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": object_type,
        "created": int(time.time()),
        "model": config.openai.model_name,
        "choices": choices,
        "usage": usage,
    }
