"""Check that only the model thread changes its state, and that waiting requests can be ended."""

import asyncio
import threading
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from fastapi.testclient import TestClient
from tinker.lib import api_future_impl

from lachesis.base.tinker_client import wait_for_sdk
from lachesis.engine.embedded_engine import Engine
from lachesis.engine.model_thread import ModelThread
from lachesis.tinker_server import json_messages, routes
from tests.engine.training_steps import datums, ids
from tests.harness.waiting import wait_until

ADAM = tinker.AdamParams(learning_rate=0.0)


class Watched(dict[str, Any]):
    """A dict that notes which threads change it."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()

    def __setitem__(self, key: str, value: Any) -> None:
        self.threads.add(threading.current_thread().name)
        super().__setitem__(key, value)


def test_samplers_are_registered_by_the_model_thread(random_model, tmp_path):
    engine = Engine(random_model, tmp_path)
    engine.samplers = watched = Watched()
    with TestClient(routes.create_app(engine, "tml-x"), headers={"X-API-Key": "tml-x"}) as client:
        session = client.post("/api/v1/create_session", json={}).json()["session_id"]
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": random_model}
        answer = client.post("/api/v1/create_sampling_session", json=body).json()
        assert client.post("/api/v1/create_sampling_session", json=body).json() == answer
        assert engine.sessions[session].sampler_ids == list(watched)
    assert watched.threads == {"model"}


def test_whatever_a_request_raises_ends_its_future(random_model, tmp_path, monkeypatch):
    """Its client would ask again and again for ever."""

    def fail(*_):
        raise ValueError("a fault of ours")

    engine = Engine(random_model, tmp_path)
    monkeypatch.setattr(json_messages.SampleBody, "to_sample_request", fail)
    with TestClient(routes.create_app(engine, "tml-x"), headers={"X-API-Key": "tml-x"}) as client:
        session = client.post("/api/v1/create_session", json={}).json()["session_id"]
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": random_model}
        sampler = client.post("/api/v1/create_sampling_session", json=body).json()
        body = {
            "sampling_session_id": sampler["sampling_session_id"],
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
            "sampling_params": {},
            "num_samples": 1,
            "seq_id": 1,
        }
        future = client.post("/api/v1/asample", json=body).json()
        answer = client.post("/api/v1/retrieve_future", json=future).json()
    assert answer == {"error": "ValueError: a fault of ours", "category": "server"}


def test_a_sampler_of_a_session_that_has_just_ended_is_refused(random_model, tmp_path, monkeypatch):
    """The session ends while the checkpoint is being read."""
    engine = Engine(random_model, tmp_path)
    load = engine.load_sampler

    def load_and_end(*arguments):
        engine.end_session(next(iter(engine.sessions)))
        return load(*arguments)

    monkeypatch.setattr(engine, "load_sampler", load_and_end)
    with TestClient(routes.create_app(engine, "tml-x"), headers={"X-API-Key": "tml-x"}) as client:
        session = client.post("/api/v1/create_session", json={}).json()["session_id"]
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": random_model}
        answer = client.post("/api/v1/create_sampling_session", json=body)
    assert (answer.status_code, "has ended" in answer.json()["detail"]) == (400, True)


def many_passes(count):
    """Datums of so different lengths that each is a pass of its own."""
    data = []
    for number in range(count):
        tokens = np.arange(500 - number) % 250
        inputs = {"target_tokens": tokens}
        data.append(tinker.Datum(model_input=ids(tokens.tolist()), loss_fn_inputs=inputs))
    return data


@pytest.fixture
def submitted(monkeypatch):
    """The ids of the requests that the SDK has submitted: it keeps them to itself."""
    request_ids: list[str] = []
    begin = api_future_impl._APIFuture.__init__

    def note(self, *arguments, **options):
        begin(self, *arguments, **options)
        request_ids.append(self.request_id)

    monkeypatch.setattr(api_future_impl._APIFuture, "__init__", note)
    return request_ids


def wait_for(request_ids, count):
    wait_until(lambda: len(request_ids) >= count, 30, lambda: request_ids, poll_s=0.01)


def cancel(engine, request_id):
    """Cancel a request in the way in which the SDK cancels samples."""
    answer = httpx.post(
        f"{engine.url}/api/v1/cancel_future",
        json={"request_id": request_id},
        headers={"X-API-Key": engine.token},
    )
    return str(answer.json()["status"])


def test_a_cancelled_operation_that_has_not_begun_adds_no_gradient(training, engine, submitted):
    """It waits behind a long one that adds none; so there is none at the step."""
    long = training.forward(many_passes(40), "cross_entropy")
    unwanted = training.forward_backward(datums(), "importance_sampling")
    wait_for(submitted, 2)
    assert cancel(engine, submitted[1]) == "ok"
    with pytest.raises(tinker.RequestFailedError, match="cancelled"):
        unwanted.result()
    long.result()
    assert training.optim_step(ADAM).result().metrics["grad_norm"] == 0.0
    assert cancel(engine, submitted[1]) == "finished"


def test_an_operation_that_has_begun_is_not_cancelled_and_the_answer_says_so(
    service, training, engine, submitted
):
    """Its gradients count, so its future must get its result and no error."""
    sampler = wait_for_sdk(service.create_sampling_client(base_model=engine.model))
    submitted.clear()
    # So many that they still go on when a busy machine lets this test ask.
    begun = training.forward_backward(many_passes(160), "cross_entropy")
    wait_for(submitted, 1)
    # Samples are drawn after the first pass of an operation that came before them.
    sampler.sample(ids([1]), 1, tinker.SamplingParams(max_tokens=1)).result()
    assert cancel(engine, submitted[0]) == "running"
    assert begun.result().metrics["loss:sum"] > 0
    assert training.optim_step(ADAM).result().metrics["grad_norm"] > 0


async def test_a_waiter_that_is_cancelled_leaves_the_model_thread_alive():
    """A client that hangs up cancels what it waits for, before the call or during it."""
    thread = ModelThread([], asyncio.get_running_loop())
    begun, may_end = threading.Event(), threading.Event()

    def wait():
        begun.set()
        return may_end.wait(30)

    ran: list[str] = []
    running = asyncio.wrap_future(thread.call_soon(wait))
    assert await asyncio.to_thread(begun.wait, 30)
    waiting = asyncio.wrap_future(thread.call_soon(lambda: ran.append("cancelled")))
    for waiter in (running, waiting):
        waiter.cancel()
    await asyncio.sleep(0)  # the cancellation reaches the thread's futures in a callback
    may_end.set()
    last = asyncio.wrap_future(thread.call_soon(lambda: ran.append("last")))
    try:
        await asyncio.wait_for(last, 30)
        assert ran == ["last"]
    finally:
        thread.stop()
