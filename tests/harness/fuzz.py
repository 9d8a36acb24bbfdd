"""What a fuzzer and strangers try on a server that runs in a process of its own."""

import random
from collections.abc import Callable, Iterator

import httpx
import hypothesis
import schemathesis
from schemathesis.checks import not_a_server_error

from lachesis.base.json_text import Json

FOREIGN: tuple[tuple[dict[str, str], int], ...] = (
    ({"Host": "evil.example"}, 403),
    ({"Origin": "http://evil.example"}, 403),
    ({"Origin": "null"}, 403),
    ({}, 401),
    ({"Authorization": "Bearer wrong", "X-API-Key": "tml-wrong"}, 401),
)


def routes(schema: Json) -> list[tuple[str, str]]:
    return [
        (method.upper(), path) for path, methods in schema["paths"].items() for method in methods
    ]


def fuzz(
    schema: Json, method: str, path: str, url: str, headers: dict[str, str], *, examples: int
) -> None:
    """Requests that fit the schema and requests that do not; none may be answered with a fault of
    the server.
    """
    operation = schemathesis.openapi.from_dict(schema)[path][method]

    @hypothesis.given(case=operation.as_strategy())
    @hypothesis.settings(
        max_examples=examples,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
        database=None,
    )
    def check(case: schemathesis.Case) -> None:
        answer = case.call(
            base_url=url, headers={**headers, **dict(case.headers or {})}, timeout=20
        )
        case.validate_response(answer, checks=[not_a_server_error])

    check()


def refusals(schema: Json, url: str) -> Iterator[tuple[str, str, dict[str, str], int, int]]:
    """Each route with each kind of stranger: method, path, headers, the status that is owed, and
    the one that came.
    """
    with httpx.Client(base_url=url, trust_env=False, timeout=20) as client:
        for method, path in routes(schema):
            place = path.replace("{", "").replace("}", "")
            for headers, owed in FOREIGN:
                yield (
                    method,
                    path,
                    headers,
                    owed,
                    client.request(method, place, headers=headers, json={}).status_code,
                )


def damage(body: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """Variants of a good body: bits turned, pieces cut out, doubled or replaced."""
    dice = random.Random(seed)
    changes: list[Callable[[bytearray, int, int], None]] = [
        lambda text, start, end: text.__setitem__(start, text[start] ^ (1 << dice.randrange(8))),
        lambda text, start, end: text.__delitem__(slice(start, end)),
        lambda text, start, end: text.__setitem__(slice(start, start), text[start:end]),
        lambda text, start, end: text.__setitem__(slice(start, end), dice.randbytes(end - start)),
    ]
    for _ in range(count):
        text = bytearray(body)
        for _ in range(dice.randint(1, 4)):
            start = dice.randrange(max(1, len(text)))
            dice.choice(changes)(text, start, min(len(text), start + dice.randint(1, 40)))
            if not text:
                break
        yield bytes(text)
