"""The trainer's side of the Atropos API: register, then fetch batches of scored groups."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from lachesis.config import RunConfig
from lachesis.errors import BatchError, ServerDownError

POLL_S = (0.05, 0.5)
"""The first and the longest pause between two questions; the API writes a line of log for each."""
Group = dict[str, Any]


class Atropos:
    """One API server, which belongs to this run."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._http = httpx.AsyncClient(base_url=url, timeout=60.0, trust_env=False)

    async def register(self, config: RunConfig, *, first_step: int, checkpoint_dir: Path) -> None:
        """Reset, register, and fetch once: environments are let in after the first fetch only, and data that came before
        the registration would block the API for good. Raises ServerDownError."""
        await self._ask("GET", "/reset_data")
        await self._ask(
            "POST",
            "/register",
            {
                "wandb_group": config.tinker.wandb_group or config.env.wandb_name or config.environment,
                "wandb_project": config.tinker.wandb_project,
                "batch_size": config.env.batch_size,
                "max_token_len": config.tinker.max_token_trainer_length,
                "checkpoint_dir": str(checkpoint_dir),
                "save_checkpoint_interval": config.tinker.save_checkpoint_interval,
                "starting_step": first_step,
                "num_steps": config.env.total_steps,
            },
        )
        await self._ask("GET", "/batch")

    async def next_batch(self) -> list[Group]:
        """Wait for a batch: its groups. Raises BatchError when the API has lost one to a score that is not a number."""
        pause_s, longest_s = POLL_S
        while True:
            answer = await self._ask("GET", "/batch")
            batch = answer.get("batch")
            if answer.get("status") == "error":
                raise ServerDownError(f"the Atropos API at {self.url} has forgotten this trainer: {answer.get('message')}")
            if batch:
                return list(batch)
            await asyncio.sleep(pause_s)
            pause_s = min(1.2 * pause_s, longest_s)

    async def close(self) -> None:
        await self._http.aclose()

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            answer = await self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise ServerDownError(f"the Atropos API at {self.url} does not answer {path}: {type(error).__name__}") from error
        if answer.status_code == 500 and path == "/batch":
            raise BatchError(
                "the Atropos API could not send a batch (HTTP 500) and has lost it: a group held a score that is NaN or "
                "infinite; see the score function of the environment"
            )
        if answer.status_code != 200:
            raise ServerDownError(f"the Atropos API answered {path} with HTTP {answer.status_code}: {answer.text[:300]}")
        if not answer.headers.get("content-type", "").startswith("application/json"):
            return {}  # /reset_data answers with a sentence
        content: dict[str, Any] = answer.json()
        return content
