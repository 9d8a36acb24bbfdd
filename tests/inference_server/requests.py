"""Requests to the inference server."""

from typing import Any

import httpx

from lachesis.config import run_config as run_config

CHAT = [{"role": "user", "content": "3+4="}]
PROMPT = [256, 18, 10, 19, 28, 258, 257]


async def ask(url: str, path: str, body: Any = None) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        return await (client.get(path) if body is None else client.post(path, json=body))
