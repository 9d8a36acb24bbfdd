"""The rehearsal cloud: our engine behind a proxy that bills every call and misbehaves on command.

/api/v1/…            the Tinker protocol, with the key of the rehearsal
/download/…          the files of checkpoints
GET  /control/bill   what was used until now
POST /control/faults {"kind": …}: begin a fault, at once or before call number `at_call`
DELETE /control/faults           lift all faults
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.tinker_cloud.bill import Bill
from tests.tinker_cloud.faults import Answer, Call, Fault, make_fault, make_refusal

API = "/api/v1/"
# A poll of the SDK waits up to 45 s; loading a large batch takes longer on a busy machine.
TIMEOUT = httpx.Timeout(120.0)
KEPT_HEADERS = ("content-type", "retry-after", "content-range", "accept-ranges", "etag")


@dataclass
class RehearsalCloud:
    """Hold the state of one rehearsal: where its engine is, its bill and its faults."""

    engine_url: str
    engine_token: str
    key: str
    bill: Bill = field(default_factory=Bill)
    faults: list[Fault] = field(default_factory=list)
    planned_faults: list[tuple[int, Fault]] = field(default_factory=list)
    """Faults that begin before the call of this number."""
    num_calls: int = 0
    client: httpx.AsyncClient = field(
        default_factory=lambda: httpx.AsyncClient(
            timeout=TIMEOUT, trust_env=False, limits=httpx.Limits(max_connections=None)
        )
    )

    async def end_sessions(self) -> None:
        """End all sessions of the engine, as if their time was over."""
        headers = {"X-API-Key": self.engine_token}
        url = f"{self.engine_url}{API}sessions"
        reason = {"reason": {"type": "errored"}}
        while session_ids := (await self.client.get(url, headers=headers)).json()["sessions"]:
            for session_id in session_ids:
                await self.client.post(f"{url}/{session_id}/finish", headers=headers, json=reason)
            await asyncio.sleep(0.05)  # The engine ends what it is doing first.

    async def forward(self, call: Call, url: str) -> Answer:
        """Send a call to the engine and return its answer."""
        headers = {**call.headers, "x-api-key": self.engine_token}
        answer = await self.client.request(call.method, url, headers=headers, content=call.body)
        kept = {name: answer.headers[name] for name in KEPT_HEADERS if name in answer.headers}
        return Answer(answer.status_code, answer.content, kept)

    async def answer(self, call: Call, url: str) -> Answer:
        """Return what the client of a call gets, after all faults that meet it."""
        self._begin_planned_faults()
        faults = [fault for fault in self.faults if fault.meets(call)]
        for fault in faults:
            if answer := await fault.before(call, self):
                return answer
        answer = await self.forward(call, url)
        self.bill.record(call.path, call.body, answer.status, answer.body)
        self._note_checkpoint(call, answer)
        for fault in faults:
            answer = await fault.after(call, answer, self)
        return answer

    def _begin_planned_faults(self) -> None:
        self.num_calls += 1
        due = [fault for at_call, fault in self.planned_faults if at_call <= self.num_calls]
        self.faults += due
        self.planned_faults = [
            (at_call, fault) for at_call, fault in self.planned_faults if at_call > self.num_calls
        ]

    def _note_checkpoint(self, call: Call, answer: Answer) -> None:
        if call.name == "retrieve_future" and answer.body.startswith(b"{"):
            content = json.loads(answer.body)
            if content.get("path") and content.get("size_bytes"):
                self.bill.record_checkpoint(content["path"], content["size_bytes"])


def create_app(cloud: RehearsalCloud) -> Starlette:
    """Return the cloud as an application."""

    async def answer_api(request: Request) -> Response:
        if request.headers.get("x-api-key") != cloud.key:
            return _to_response(make_refusal(401, "Invalid API key."))
        call = await _read_call(request, request.url.path.removeprefix(API))
        answer = await cloud.answer(call, _make_engine_url(cloud, request))
        return _to_response(answer)

    async def answer_download(request: Request) -> Response:
        call = await _read_call(request, request.url.path.removeprefix("/"))
        return _to_response(await cloud.answer(call, _make_engine_url(cloud, request)))

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with cloud.client:
            yield

    methods = ["GET", "POST", "PUT", "DELETE"]
    return Starlette(
        routes=[
            Route(f"{API}{{path:path}}", answer_api, methods=methods),
            Route("/download/{path:path}", answer_download),
            *_make_control_routes(cloud),
        ],
        lifespan=lifespan,
    )


def _make_control_routes(cloud: RehearsalCloud) -> list[Route]:
    async def show_bill(request: Request) -> Response:
        met = {fault.kind: fault.num_met for fault in cloud.faults}
        return JSONResponse({**cloud.bill.to_json(), "faults": met, "num_calls": cloud.num_calls})

    async def begin_fault(request: Request) -> Response:
        content: dict[str, Any] = await request.json()
        at_call = content.pop("at_call", 0)
        fault = make_fault(content)
        cloud.planned_faults.append((cloud.num_calls + at_call, fault))
        return JSONResponse({"kind": fault.kind})

    async def lift_faults(request: Request) -> Response:
        cloud.faults.clear()
        cloud.planned_faults.clear()
        return JSONResponse({})

    return [
        Route("/control/bill", show_bill),
        Route("/control/faults", begin_fault, methods=["POST"]),
        Route("/control/faults", lift_faults, methods=["DELETE"]),
    ]


async def _read_call(request: Request, path: str) -> Call:
    # The engine makes the addresses of downloads from the host that the client has used.
    left_out = ("content-length", "connection", "accept-encoding", "x-api-key")
    headers = {name: value for name, value in request.headers.items() if name not in left_out}
    return Call(request.method, path, await request.body(), headers)


def _make_engine_url(cloud: RehearsalCloud, request: Request) -> str:
    query = f"?{request.url.query}" if request.url.query else ""
    return f"{cloud.engine_url}{request.scope['raw_path'].decode()}{query}"


def _to_response(answer: Answer) -> Response:
    if answer.cut_at is None:
        return Response(answer.body, answer.status, answer.headers)
    part = answer.body[: int(answer.cut_at * len(answer.body))]

    async def stream() -> AsyncIterator[bytes]:
        yield part

    # The server closes the connection because less is sent than was announced.
    headers = {**answer.headers, "content-length": str(len(answer.body) + 1)}
    return StreamingResponse(stream(), answer.status, headers)
