"""Run the operations of the bridge in their order on a thread, and its samples side by side."""

import asyncio
import bisect
import itertools
import logging
from collections.abc import Callable
from concurrent.futures import Future as ConcurrentFuture
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from lachesis.base.errors import EngineRequestError, LachesisError
from lachesis.base.http_client import open_async_service_client
from lachesis.skyrl_bridge.client import (
    MAX_TRIES,
    PAUSE_S,
    POLL_TIMEOUT,
    PROTOBUF,
    check_response,
    make_silence_error,
    read_result,
)
from lachesis.skyrl_bridge.messages import decode_samples
from lachesis.tinker_server.engine_interface import OperationCall, Result
from lachesis.tinker_server.futures import Payload, RequestFuture
from lachesis.tinker_server.model_description import BridgedModel
from lachesis.tinker_server.protobuf_messages import encode_sample_response
from lachesis.tinker_server.sample_messages import SampledSequence, SampleRequest, SampleResponse

log = logging.getLogger(__name__)
# Samples that the engine gets at a time; each holds a connection.
MAX_SAMPLES_IN_FLIGHT = 400


@dataclass(frozen=True)
class SamplingWeights:
    """Name weights that the engine samples from; without an adapter they are the base model's."""

    upstream_sampler: str
    """The engine's sampling session."""
    upstream_model: str = ""
    """The adapter that holds the weights."""
    upstream_path: str = ""
    """The path under which the engine has saved them for sampling."""


@dataclass(eq=False)
class BridgedSampler:
    """Hold frozen weights for sampling, which the engine has as a sampling session of its own."""

    sampler_id: str
    limits: BridgedModel
    weights: SamplingWeights
    model_path: str | None
    last_used: float
    num_in_flight: int = 0
    sequence_ids: "itertools.count[int]" = field(default_factory=itertools.count)

    @property
    def model_name(self) -> str:
        """Return the name of the base model."""
        return self.limits.name


class BridgeWorker:
    """Run what the routes submit; `submit` and `submit_sample` belong to the event loop."""

    def __init__(self, url: str, key: str, loop: asyncio.AbstractEventLoop) -> None:
        self._url, self._loop = f"{url.rstrip('/')}/api/v1/", loop
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="operations")
        self._queued: dict[str, ConcurrentFuture[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(MAX_SAMPLES_IN_FLIGHT)
        self._client = open_async_service_client(
            headers={"X-API-Key": key},
            timeout=POLL_TIMEOUT,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    def submit(self, future: RequestFuture, call: OperationCall) -> None:
        """Queue an operation; its result or its error becomes that of the future."""

        def run() -> None:
            self._queued.pop(future.request_id, None)
            try:
                result = call()
                payload = result if isinstance(result, bytes | dict) else {}
            except Exception as error:
                payload = self.make_error(error)
            self._loop.call_soon_threadsafe(future.finish, payload)

        self._queued[future.request_id] = self._executor.submit(run)

    def call_soon(self, call: Callable[[], Result]) -> ConcurrentFuture[Result]:
        """Run a short call now, and return its future."""
        result: ConcurrentFuture[Result] = ConcurrentFuture()
        try:
            result.set_result(call())
        except Exception as error:
            result.set_exception(error)
        return result

    def cancel_queued_operation(self, future: RequestFuture) -> bool:
        """Remove the operation of a future from the queue; False if it has begun."""
        queued = self._queued.get(future.request_id)
        return queued is None or queued.cancel()

    def make_error(self, error: Exception) -> Payload:
        """Return an error in the protocol's format, as a fault of the client or of the server."""
        if isinstance(error, EngineRequestError):
            return {"error": str(error), "category": "user"}
        if isinstance(error, LachesisError):
            return {"error": f"{error.code}: {error}", "category": "server"}
        log.error("the bridge failed at a request", exc_info=error)
        return {"error": f"{type(error).__name__}: {error}", "category": "server"}

    @property
    def num_waiting(self) -> int:
        """Return the number of sampling requests that have not begun."""
        return max(0, len(self._tasks) - MAX_SAMPLES_IN_FLIGHT)

    def stop(self) -> None:
        """End the work in progress; waiting requests are dropped."""
        for task in self._tasks:
            task.cancel()
        self._executor.shutdown(wait=False, cancel_futures=True)

    # --- samples

    def submit_sample(
        self, future: RequestFuture, sampler: BridgedSampler, request: SampleRequest
    ) -> None:
        """Queue a checked sampling request with one of the samplers."""
        task = self._loop.create_task(self._run_sample(future, sampler, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_sample(
        self, future: RequestFuture, sampler: BridgedSampler, request: SampleRequest
    ) -> None:
        """Sample for a request within the limit of requests at a time, and finish its future."""
        sampler.num_in_flight += 1
        try:
            async with self._slots:
                if request.is_cancelled():
                    return
                response = await self._sample(sampler, request)
                response = cut_at_stop_string(response, request, sampler.limits)
                future.finish(encode_sample_response(response))
        except Exception as error:
            future.finish(self.make_error(error))
        finally:
            sampler.num_in_flight -= 1

    async def _sample(self, sampler: BridgedSampler, request: SampleRequest) -> SampleResponse:
        """Send a request for samples, and poll until its result is there."""
        _require_offered(request)
        body = make_sample_body(sampler, request)
        response = await self._post("asample", body, {})
        check_response(response, "asample")
        question = {"request_id": str(response.json()["request_id"])}
        while True:
            answer = await self._post("retrieve_future", question, {"accept": PROTOBUF})
            result = read_result(answer)
            if isinstance(result, bytes):
                return decode_samples(result, len(request.prompt))
            if result is not None:
                raise EngineRequestError(f"a sampling request was answered by {result}")

    async def _post(
        self, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> httpx.Response:
        """Send a request whose repetition does no harm, again if its answer is lost."""
        for num_tries in range(MAX_TRIES):
            try:
                return await self._client.post(self._url + path, json=body, headers=headers)
            except httpx.HTTPError as error:
                last_error = error
                await asyncio.sleep(PAUSE_S * 2**num_tries)
        raise make_silence_error(self._url, last_error)


def _require_offered(request: SampleRequest) -> None:
    """Raise EngineRequestError for what an engine behind the bridge would leave out in silence."""
    spec = request.prompt_logprobs_spec
    for name, value in (
        ("topk_sample_logprobs", request.num_top_logprobs),
        ("topk_prompt_logprobs", spec.num_top_logprobs),
        ("target_prompt_logprobs", spec.target_ids is not None),
        ("prompt_alt_tokens_k", spec.num_alternatives),
    ):
        if value:
            raise EngineRequestError(f"{name} is not offered over the bridge; leave it out")


def make_sample_body(sampler: BridgedSampler, request: SampleRequest) -> dict[str, Any]:
    """Return the body of a sampling request to the engine.

    The tokens that end an answer are always named, because an engine that is told none ends none.
    """
    limits = sampler.limits
    longest = max(1, limits.context_length - len(request.prompt))
    params: dict[str, Any] = {
        "max_tokens": min(request.max_tokens or longest, longest),
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop": sorted(request.stop_tokens),
    }
    if request.seed is not None:
        params["seed"] = request.seed
    return {
        "sampling_session_id": sampler.weights.upstream_sampler,
        "seq_id": next(sampler.sequence_ids),
        "num_samples": request.num_samples,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": request.prompt}]},
        "sampling_params": params,
        "prompt_logprobs": request.prompt_logprobs_spec.include_logprobs,
        "type": "sample",
    }


def cut_at_stop_string(
    response: SampleResponse, request: SampleRequest, model: BridgedModel
) -> SampleResponse:
    """Return the response with each answer cut after the token that completes a stop string."""
    if not request.stop_strings:
        return response
    sequences = [_cut(sequence, request.stop_strings, model) for sequence in response.sequences]
    return SampleResponse(sequences, response.prompt_logprobs)


def _cut(
    sequence: SampledSequence, stop_strings: tuple[str, ...], model: BridgedModel
) -> SampledSequence:
    """Return a sequence cut after its first stop string."""

    def has_stop(length: int) -> bool:
        text = model.tokenizer.decode(sequence.tokens[:length])
        return any(stop in text for stop in stop_strings)

    # A stop string that a beginning of the answer holds is also in every longer one.
    length = bisect.bisect_left(range(len(sequence.tokens) + 1), True, key=has_stop)
    if length > len(sequence.tokens):
        return sequence
    return replace(
        sequence,
        tokens=sequence.tokens[:length],
        logprobs=sequence.logprobs[:length],
        has_stopped=True,
    )
