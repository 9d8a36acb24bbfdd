"""Serve samples to environments over HTTP.

Every route uses the newest published weights; the same routes under `/base` use the base model, for
comparison.

    GET  /health            readiness, phase and step of the trainer
    GET  /wandb_info        project and group of the run
    POST /generate          token-exact sampling, in the dialects of vLLM
                            (`prompt.prompt_token_ids`) and SGLang (`input_ids`)
    GET  /v1/models         the name of the model
    POST /v1/completions  /v1/chat/completions   sampling as in OpenAI's API
    POST /tokenize          token ids of a conversation, up to where the next answer begins
    POST /logprobs          log-probabilities of a given text or token ids
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import tinker
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from lachesis.base import http_server
from lachesis.base.json_text import Json
from lachesis.config.run_config import RunConfig
from lachesis.inference_server.sampling import ClientDisconnectedError, Inference, Sample
from lachesis.inference_server.sampling_parameters import (
    BadRequestError,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    LogprobsRequest,
    refuse_unsupported,
)
from lachesis.trainer.trained_model import Policy
from lachesis.trainer.trainer_state import TrainerState

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def create_app(
    policy: Policy, tokenizer: PreTrainedTokenizerBase, config: RunConfig, state: TrainerState
) -> FastAPI:
    """Create the application; serve it once the policy has published its first weights."""
    app = FastAPI(title="Lachesis inference", openapi_url=None)
    for prefix, is_base in (("", False), ("/base", True)):
        app.include_router(
            create_router(
                Inference(policy, tokenizer, config, state.usage, is_base=is_base), state, config
            ),
            prefix=prefix,
        )
    http_server.add_error_handlers(app)
    app.add_exception_handler(BadRequestError, _make_error_handler(400))
    app.add_exception_handler(ValidationError, _make_error_handler(400))
    app.add_exception_handler(tinker.RequestFailedError, _make_error_handler(400))
    app.add_exception_handler(tinker.TinkerError, _make_error_handler(502))
    app.add_exception_handler(ClientDisconnectedError, _make_error_handler(499))
    return app


def _make_error_handler(status: int) -> Callable[[Request, Exception], Awaitable[JSONResponse]]:
    """Return a handler that answers an error as OpenAI's API does, with this status."""

    async def handle_error(request: Request, error: Exception) -> JSONResponse:
        if status == 400:
            error_type = "invalid_request_error"
        else:
            error_type = "server_error"
        return JSONResponse(
            {"error": {"message": http_server.escape_surrogates(error), "type": error_type}}, status
        )

    return handle_error


def create_router(inference: Inference, state: TrainerState, config: RunConfig) -> APIRouter:
    """Return the routes that sample from the weights of `inference`."""
    router = APIRouter()
    _add_state_routes(router, state, config)
    _add_openai_routes(router, inference, config)

    @router.post("/generate", response_model=None)
    async def generate(body: GenerateRequest, request: Request) -> JSONResponse:
        is_sglang = body.input_ids is not None or body.text is not None
        response = await (_generate_sglang if is_sglang else _generate_vllm)(
            inference, body, request
        )
        # The response is created here because FastAPI would check thousands of numbers in Python.
        return JSONResponse(response)

    @router.post("/tokenize")
    async def tokenize(body: LogprobsRequest) -> Json:
        ids = inference.encode_chat(body.messages or [])
        return {"tokens": ids, "count": len(ids)}

    @router.post("/logprobs")
    async def logprobs(body: LogprobsRequest, request: Request) -> Json:
        """Return the log-probability of each token of a text or a conversation."""
        refuse_unsupported(body.model_extra or {})
        ids = body.input_ids
        if ids is None:
            if body.messages:
                ids = inference.encode_chat(body.messages)
            else:
                ids = inference.encode(body.prompt)
        return {"tokens": ids, "logprobs": await inference.compute_logprobs(request, ids)}

    return router


def _add_state_routes(router: APIRouter, state: TrainerState, config: RunConfig) -> None:
    """Add the route that tells phase, step, usage and waits of the trainer."""

    @router.get("/health")
    async def health() -> Json:
        """Return phase, step, usage and waits of the trainer."""
        return {
            "status": "ok",
            "trainer_initialized": True,
            "phase": state.phase,
            "step": state.step,
            "waiting_for": state.waiting_for,
            "since": state.waiting_since,
            "spent": state.get_spent(),
            "pause": state.get_pause(),
            "usage": state.usage.to_json(),
            "total_steps": config.env.total_steps,
            "groups": state.groups,
            "groups_by_environment": state.groups_by_environment,
            "resumed": state.resume_point,
            "wandb_url": state.wandb_url,
            "wandb_error": state.wandb_error,
        }

    @router.get("/wandb_info")
    async def wandb_info() -> Json:
        group = config.tinker.wandb_group or config.env.wandb_name
        return {"project": config.tinker.wandb_project, "group": group, "url": state.wandb_url}


def _add_openai_routes(router: APIRouter, inference: Inference, config: RunConfig) -> None:
    """Add OpenAI's routes: the models, completions and chat."""

    @router.get("/v1/models")
    async def models() -> Json:
        model = {"id": config.openai.model_name, "object": "model", "owned_by": "lachesis"}
        return {"object": "list", "data": [model]}

    @router.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Json:
        """Return completions of a text, as OpenAI's `/v1/completions` does."""
        ids = inference.encode(body.prompt)
        samples = await inference.sample(request, ids, body)
        choices = [
            {
                "index": index,
                "text": inference.decode(sample.tokens, body),
                "finish_reason": sample.stop_reason,
                "logprobs": _build_completion_logprobs(inference, sample, body.logprobs),
            }
            for index, sample in enumerate(samples)
        ]
        return _build_openai_response("text_completion", config, ids, samples, choices)

    @router.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Json:
        """Return the next message of a conversation."""
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


async def _generate_vllm(inference: Inference, body: GenerateRequest, request: Request) -> Json:
    """Return one {id: logprob} per token of each sample, of the sampled token only."""
    if isinstance(body.prompt, dict):
        prompt = body.prompt.get("prompt_token_ids")
    else:
        prompt = body.prompt
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
    """Return one object for n = 1, else a list, with [logprob, id, text] per token."""
    ids = inference.encode(body.text) if body.input_ids is None else body.input_ids
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


def _build_completion_logprobs(
    inference: Inference, sample: Sample, num_logprobs: int | None
) -> Json | None:
    """Return sampled log-probabilities in OpenAI's format of completions, if requested."""
    if num_logprobs is None:
        return None
    texts = [inference.tokenizer.decode([token]) for token in sample.tokens]
    offsets = list(itertools.accumulate(map(len, texts), initial=0))[:-1]
    return {
        "tokens": texts,
        "token_logprobs": sample.logprobs,
        "top_logprobs": None,
        "text_offset": offsets,
    }


def _build_chat_logprobs(inference: Inference, sample: Sample) -> Json:
    """Return sampled log-probabilities in OpenAI's format of chat completions."""
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
    """Return an answer with its choices and counts of tokens, as OpenAI's API gives it."""
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
