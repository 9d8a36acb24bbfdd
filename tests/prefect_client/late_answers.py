"""A proxy before a real Prefect server, which loses or delays what is asked or answered."""

import contextlib
import time
from collections.abc import Iterator
from typing import Literal

import httpx

from lachesis.prefect_client.serve_info import HOME_HEADER
from tests.harness.http_answers import Reply, Request, serve_answers

Fault = Literal["none", "answer late", "answer lost", "request lost", "refused", "busy"]


class LateAnswers:
    """Hold which fault the next submissions meet; all other requests are only passed on."""

    def __init__(self, server: str) -> None:
        self.server = server
        self.fault: Fault = "none"
        self.delay_s = 0.0
        self.url = ""
        self.num_submissions = 0


@contextlib.contextmanager
def delay_answers(server: str) -> Iterator[LateAnswers]:
    """Run the proxy; its `url` takes the place of the server's, which ends with `/api`."""
    faults = LateAnswers(server.removesuffix("/api"))

    def answer(request: Request) -> Reply | None:
        is_submission = request.path.endswith("/create_flow_run")
        faults.num_submissions += is_submission
        fault = faults.fault if is_submission else "none"
        if fault == "request lost":
            return None
        if fault in ("refused", "busy"):
            return Reply(409 if fault == "refused" else 503, b"no")
        response = httpx.request(
            request.method,
            faults.server + request.path,
            content=request.body,
            headers={"Content-Type": "application/json"},
            trust_env=False,
        )
        if fault == "answer late":
            time.sleep(faults.delay_s)
        proof = response.headers.get(HOME_HEADER, "")
        headers = {HOME_HEADER: proof} if proof else {}
        reply = Reply(response.status_code, response.content, headers)
        return None if fault == "answer lost" else reply

    with serve_answers(answer) as url:
        faults.url = f"{url}/api"
        yield faults
