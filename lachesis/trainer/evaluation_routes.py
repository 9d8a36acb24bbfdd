"""Add the routes by which environments evaluate during training.

    GET  /evaluations/next?environment=NAME   wait for an evaluation: {id, step}, {} or {over: true}
    POST /evaluations/{id}/alive              send a heartbeat
    POST /evaluations/{id}                    report {metrics, items, seconds}, or {error}
    /evaluations/{id}/generate, /v1/...       sample like the server's own routes, with the weights
                                              of that step

See `lachesis.trainer.evaluation_schedule`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import tinker
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from lachesis.base.json_text import Json
from lachesis.base.tinker_client import call_sdk
from lachesis.config.run_config import RunConfig
from lachesis.inference_server.app import create_router
from lachesis.inference_server.sampling import Inference, Sample, cancel_on_disconnect, to_samples
from lachesis.tinker_conformance.answer_shape import check_samples
from lachesis.trainer.evaluation_schedule import EvaluationEndedError
from lachesis.trainer.trained_model import Policy
from lachesis.trainer.trainer_state import TrainerState

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class EvaluationReport(BaseModel):
    """Report the result of an evaluation."""

    metrics: Json = {}
    items: float | None = None
    seconds: float | None = None
    error: str | None = None


class EvaluationInference(Inference):
    """Sample with the weights of the evaluation that the path names."""

    def __init__(
        self,
        policy: Policy,
        tokenizer: PreTrainedTokenizerBase,
        config: RunConfig,
        state: TrainerState,
    ) -> None:
        super().__init__(policy, tokenizer, config, state.usage, is_base=False)
        self.state = state

    def get_sampling_client(self, request: Request) -> tinker.SamplingClient:
        return self.state.evaluations.get_sampler(request.path_params["evaluation"])

    async def sample_and_count(
        self,
        request: Request,
        ids: list[int],
        num_samples: int,
        params: tinker.SamplingParams,
        stop_ids: list[int],
    ) -> list[Sample]:
        """Sample and count the tokens, which are paid for but are not training's own requests."""
        prompt = tinker.ModelInput.from_ints(ids)
        response = await cancel_on_disconnect(
            request,
            call_sdk(self.get_sampling_client(request), "sample", prompt, num_samples, params),
        )
        check_samples(response.sequences, num_samples)
        self.usage.record_evaluation_tokens(
            len(ids), sum(len(sequence.tokens) for sequence in response.sequences)
        )
        return to_samples(response.sequences, stop_ids)


def add_evaluation_routes(
    app: FastAPI,
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    config: RunConfig,
    state: TrainerState,
) -> None:
    """Add the routes to the inference server's application."""
    evaluations, router = state.evaluations, APIRouter(prefix="/evaluations")

    @router.get("/next")
    async def next_evaluation(request: Request, environment: str = "") -> Json:
        offer: Json = await cancel_on_disconnect(request, evaluations.wait_for_next(environment))
        return offer

    @router.post("/{evaluation}/alive")
    async def report_alive(evaluation: str) -> Json:
        evaluations.record_heartbeat(evaluation)
        return {}

    @router.post("/{evaluation}")
    async def finish(evaluation: str, body: EvaluationReport) -> Json:
        evaluations.finish(evaluation, body.model_dump())
        return {}

    async def answer_evaluation_ended(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(
            {"error": {"message": str(error), "type": "invalid_request_error"}}, 410
        )

    app.include_router(router)
    inference = EvaluationInference(policy, tokenizer, config, state)
    app.include_router(create_router(inference, state, config), prefix="/evaluations/{evaluation}")
    app.add_exception_handler(EvaluationEndedError, answer_evaluation_ended)
