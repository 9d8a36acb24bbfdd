"""An environment samples from an endpoint whose key it does not have."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.base.errors import ProcessExitedError
from lachesis.supervision import endpoint_proxy
from lachesis.supervision.endpoint import EndpointProxy, make_endpoint_proxy
from lachesis.supervision.group import ServiceGroup
from lachesis.supervision.health import wait_until_healthy
from tests.endpoint import Endpoint, serving

SUM: Any = [{"role": "user", "content": "1+1="}]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def proxy(endpoint: Endpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EndpointProxy]:
    with pytest.MonkeyPatch.context() as patch, ServiceGroup() as group:
        patch.setenv("OPENAI_BASE_URL", endpoint.url)
        patch.setenv("OPENAI_API_KEY", endpoint.key)
        made = make_endpoint_proxy(tmp_path_factory.mktemp("proxy") / "model.jsonl")
        group.start(made.service)
        wait_until_healthy(group, made.service)
        yield made


@pytest.fixture
def client(proxy: EndpointProxy) -> Iterator[openai.OpenAI]:
    """The real client, with the token that the environment's process gets."""
    with openai.OpenAI(
        base_url=proxy.base_url, api_key=proxy.client_env["LACHESIS_INFERENCE_TOKEN"], max_retries=0
    ) as made:
        yield made


def test_the_real_client_samples_through_it(
    client: openai.OpenAI, endpoint: Endpoint, proxy: EndpointProxy
) -> None:
    """Whole answers, streamed ones and the list of models; the endpoint is sent its key, which the
    client never had.
    """
    answer = client.chat.completions.create(model="right", messages=SUM, n=3)
    assert [choice.message.content for choice in answer.choices] == ["2"] * 3
    events = client.chat.completions.create(
        model="right", messages=[{"role": "user", "content": "123+456="}], stream=True
    )
    assert [event.choices[0].delta.content for event in events] == ["5", "7", "9"]
    assert [model.id for model in client.models.list()] == ["right"]
    assert endpoint.keys == {f"Bearer {endpoint.key}"}
    assert endpoint.key not in str(proxy.client_env)
    assert endpoint.key not in str(proxy.service.argv)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/embeddings", 404),
        ("POST", "/v1/chat/completions/../../keys", 404),
        ("GET", "/v1/models/../keys", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
    ],
)
def test_other_routes_of_the_endpoint_are_out_of_reach(
    proxy: EndpointProxy, method: str, path: str, status: int
) -> None:
    host, _ = proxy.base_url.rsplit("/", 1)
    headers = {"Authorization": f"Bearer {proxy.client_env['LACHESIS_INFERENCE_TOKEN']}"}
    with httpx.Client(trust_env=False) as plain:
        request = plain.build_request(method, host, headers=headers)
        request.url = request.url.copy_with(raw_path=path.encode())
        assert plain.send(request).status_code == status


def test_the_token_is_needed_and_large_bodies_are_refused(
    proxy: EndpointProxy, endpoint: Endpoint
) -> None:
    url = f"{proxy.base_url}/chat/completions"
    for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": f"Bearer {endpoint.key}"}):
        assert httpx.post(url, json={}, headers=headers, trust_env=False).status_code == 401
    headers = {"Authorization": f"Bearer {proxy.client_env['LACHESIS_INFERENCE_TOKEN']}"}

    def pieces() -> Iterator[bytes]:
        for _ in range(endpoint_proxy.MAX_REQUEST_BYTES // 1_000_000 + 1):
            yield b" " * 1_000_000

    assert (
        httpx.post(url, content=pieces(), headers=headers, trust_env=False, timeout=60).status_code
        == 413
    )


def test_an_endpoint_that_echoes_the_key_is_not_repeated(
    client: openai.OpenAI, endpoint: Endpoint, proxy: EndpointProxy
) -> None:
    with pytest.raises(openai.AuthenticationError, match=r"refused Bearer \*\*\*") as refused:
        client.chat.completions.create(model="status-401", messages=SUM)
    assert endpoint.key not in str(refused.value)
    assert (
        client.chat.completions.create(model="echo", messages=SUM).choices[0].message.content
        == "Bearer ***"
    )
    assert endpoint.key not in proxy.service.log.read_text()


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("status-429", openai.RateLimitError),
        ("status-500", openai.InternalServerError),
        ("status-307", openai.InternalServerError),
        ("cut", openai.APIConnectionError),
    ],
)
def test_a_failing_endpoint_fails_as_before(
    client: openai.OpenAI, model: str, error: type[Exception]
) -> None:
    """A redirection is not followed; an answer that is cut in the middle is no shorter answer."""
    with pytest.raises((error, httpx.RemoteProtocolError)) as failed:
        client.chat.completions.create(model=model, messages=SUM)
    if model == "status-307":
        assert "redirects with HTTP 307, which is not followed" in str(failed.value)


def test_an_endpoint_that_is_away_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the password that its address may hold."""
    monkeypatch.setenv("OPENAI_BASE_URL", "http://me:pass-word-1@127.0.0.1:9/v1")
    with ServiceGroup() as group:
        made = make_endpoint_proxy(tmp_path / "model.jsonl")
        group.start(made.service)
        wait_until_healthy(group, made.service)
        headers = {"Authorization": f"Bearer {made.client_env['LACHESIS_INFERENCE_TOKEN']}"}
        answer = httpx.get(f"{made.base_url}/models", headers=headers, trust_env=False)
    assert answer.status_code == 502
    assert (
        "the endpoint http://127.0.0.1:9/v1 could not be used: ConnectError"
        in answer.json()["error"]["message"]
    )
    assert "pass-word" not in answer.text


def test_an_address_that_is_none_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:port/v1")
    with ServiceGroup() as group:
        made = make_endpoint_proxy(tmp_path / "model.jsonl")
        group.start(made.service)
        with pytest.raises(ProcessExitedError, match=r"OPENAI_BASE_URL is not an address"):
            wait_until_healthy(group, made.service)


@given(st.text(alphabet="ab", max_size=60), st.lists(st.integers(0, 70), max_size=8))
async def test_no_split_of_an_answer_lets_the_key_through(text: str, cuts: list[int]) -> None:
    key, body = b"aabab", text.encode()
    places = [0, *sorted(cuts), len(body)]

    class Answer(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            for start, end in itertools.pairwise(places):
                yield body[start:end]

    pieces = [
        piece
        async for piece in endpoint_proxy._redact_body(httpx.Response(200, stream=Answer()), key)
    ]
    assert b"".join(pieces) == body.replace(key, b"***")
