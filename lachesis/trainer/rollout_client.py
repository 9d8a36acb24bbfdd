"""The trainer's side of the Atropos API: register, then fetch batches of scored groups."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import httpx

from lachesis.base.errors import ServerDownError
from lachesis.config.run_config import RunConfig
from lachesis.trainer.batch_json import read_batch_json

log = logging.getLogger(__name__)
PATIENCE_S = 120.0
"""An API that is gone is started again by the run's flow; longer than that takes."""
POLL_S = (0.05, 0.5)
"""The first and the longest pause between two questions, where the API does not wait by itself; it logs each."""
WAIT_S = 20
"""So long the API may wait for a batch before it answers that there is none."""
Group = dict[str, Any]


class Atropos:
    """One API server, which belongs to this run."""

    def __init__(self, url: str) -> None:
        self.url = url
        # Packing a batch would take the API seconds, for a way that never leaves this machine.
        headers = {"Accept-Encoding": "identity"}
        self._http = httpx.AsyncClient(base_url=url, timeout=60.0, trust_env=False, headers=headers)

    async def register(self, config: RunConfig, *, first_step: int, checkpoint_dir: Path) -> None:
        """Reset, register, and fetch once: environments are let in after the first fetch only, and data that came before
        the registration would block the API for good. Raises ServerDownError."""
        self._registration = {
            "wandb_group": config.tinker.wandb_group or config.env.wandb_name or config.environment,
            "wandb_project": config.tinker.wandb_project,
            "batch_size": config.env.batch_size,
            "max_token_len": config.tinker.max_token_trainer_length,
            "checkpoint_dir": str(checkpoint_dir),
            "save_checkpoint_interval": config.tinker.save_checkpoint_interval,
            "num_steps": config.env.total_steps,
        }
        await self._register(first_step)

    async def _register(self, step: int) -> None:
        await self._ask("GET", "/reset_data")
        await self._ask("POST", "/register", {**self._registration, "starting_step": step})
        await self._ask("GET", "/batch")

    async def next_batch(self, step: int) -> list[Group]:
        """Wait for a batch: its groups. An API that is gone is waited for, and one that was started anew is told of this
        trainer and its `step` again. Raises ServerDownError after PATIENCE_S seconds without an API."""
        pause_s, longest_s = POLL_S
        seen = time.monotonic()
        while True:
            asked = time.monotonic()
            try:
                answer = await self._ask("GET", "/batch", wait=WAIT_S)
                if answer.get("status") == "error":  # it knows nobody
                    await self._register(step)
                    log.warning("the Atropos API was started anew; what was queued there is lost, and training goes on")
                seen = time.monotonic()
            except ServerDownError:
                if time.monotonic() - seen > PATIENCE_S:
                    raise
                answer = {}
            if answer.get("batch"):
                return list(answer["batch"])
            if time.monotonic() - asked < 1:  # an API that answers at once
                await asyncio.sleep(pause_s)
                pause_s = min(1.2 * pause_s, longest_s)

    async def lost(self) -> dict[str, float]:
        """Groups that the API's guards have dropped as too old, or refused as unusable, since it was started."""
        try:
            counts = await self._ask("GET", "/counts")
        except ServerDownError:
            return {}
        return {f"queue/{name}": float(counts[name]) for name in ("dropped", "refused") if name in counts}

    async def close(self) -> None:
        await self._http.aclose()

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None, **query: Any) -> dict[str, Any]:
        try:
            answer = await self._http.request(method, path, json=body, params=query or None)
        except httpx.HTTPError as error:
            raise ServerDownError(f"the Atropos API at {self.url} does not answer {path}: {type(error).__name__}") from error
        if answer.status_code != 200:
            raise ServerDownError(f"the Atropos API answered {path} with HTTP {answer.status_code}: {answer.text[:300]}")
        if not answer.headers.get("content-type", "").startswith("application/json"):
            return {}  # /reset_data answers with a sentence
        content: dict[str, Any] = await asyncio.to_thread(read_batch_json, answer.content)
        return content
