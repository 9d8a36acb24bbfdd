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
MAX_OUTAGE_S = 120.0
"""An API that is gone is started again by the run's flow; longer than that takes."""
POLL_INTERVALS_S = (0.05, 0.5)
"""The first and the longest pause between two questions, where the API does not wait by itself; it
logs each.
"""
LONG_POLL_S = 20
"""So long the API may wait for a batch before it answers that there is none."""
ScoredGroup = dict[str, Any]


class RolloutClient:
    """One API server, which belongs to this run."""

    def __init__(self, url: str) -> None:
        self.url = url
        # Packing a batch would take the API seconds, for a way that never leaves this machine.
        headers = {"Accept-Encoding": "identity"}
        self._http = httpx.AsyncClient(base_url=url, timeout=60.0, trust_env=False, headers=headers)

    async def register(self, config: RunConfig, *, first_step: int, checkpoint_dir: Path) -> None:
        """Reset, register, and fetch once: environments are let in after the first fetch only, and
        data that came before the registration would block the API for good. Raises ServerDownError.
        """
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
        await self._request("GET", "/reset_data")
        await self._request("POST", "/register", {**self._registration, "starting_step": step})
        await self._request("GET", "/batch")

    async def next_batch(self, step: int) -> list[ScoredGroup]:
        """Wait for a batch: its groups. An API that is gone is waited for, and one that was started
        anew is told of this trainer and its `step` again. Raises ServerDownError after PATIENCE_S
        seconds without an API.
        """
        pause_s, max_pause_s = POLL_INTERVALS_S
        answered_at = time.monotonic()
        while True:
            requested_at = time.monotonic()
            try:
                response = await self._request("GET", "/batch", wait=LONG_POLL_S)
                if response.get("status") == "error":  # it knows nobody
                    await self._register(step)
                    log.warning(
                        "the Atropos API was started anew; what was queued there is lost, and training goes on"
                    )
                answered_at = time.monotonic()
            except ServerDownError:
                if time.monotonic() - answered_at > MAX_OUTAGE_S:
                    raise
                response = {}
            if response.get("batch"):
                return list(response["batch"])
            if time.monotonic() - requested_at < 1:  # an API that answers at once
                await asyncio.sleep(pause_s)
                pause_s = min(1.2 * pause_s, max_pause_s)

    async def read_queue_counts(self) -> dict[str, float]:
        """Groups that the API's guards have dropped as too old, or refused as unusable, since it
        was started.
        """
        try:
            counts = await self._request("GET", "/counts")
        except ServerDownError:
            return {}
        return {
            f"queue/{name}": float(counts[name])
            for name in ("dropped", "refused")
            if name in counts
        }

    async def close(self) -> None:
        await self._http.aclose()

    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None, **query: Any
    ) -> dict[str, Any]:
        try:
            response = await self._http.request(method, path, json=body, params=query or None)
        except httpx.HTTPError as error:
            raise ServerDownError(
                f"the Atropos API at {self.url} does not answer {path}: {type(error).__name__}"
            ) from error
        if response.status_code != 200:
            raise ServerDownError(
                f"the Atropos API answered {path} with HTTP {response.status_code}: {response.text[:300]}"
            )
        if not response.headers.get("content-type", "").startswith("application/json"):
            return {}  # /reset_data answers with a sentence
        content: dict[str, Any] = await asyncio.to_thread(read_batch_json, response.content)
        return content
