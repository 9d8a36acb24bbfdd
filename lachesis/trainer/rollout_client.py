"""Call the Atropos API for the trainer: register, then fetch batches of scored groups."""

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Any

import httpx

from lachesis.base.errors import ServerDownError
from lachesis.base.http_client import open_async_service_client
from lachesis.config.run_config import RunConfig
from lachesis.rollout_api.batch_json import read_batch_json

log = logging.getLogger(__name__)
# How long to wait for an API that is gone; the run's flow restarts it in less time.
MAX_OUTAGE_S = 120.0
# The first and the longest pause between two requests to an API without long polling.
POLL_INTERVALS_S = (0.05, 0.5)
# How long the API may wait for a batch before it responds without one.
LONG_POLL_S = 20
ScoredGroup = dict[str, Any]


class RolloutClient:
    """Call the API server of this run."""

    def __init__(self, url: str) -> None:
        self.url = url
        # Compressing a batch would take the API seconds, for data that stays on this machine.
        headers = {"Accept-Encoding": "identity"}
        self._http = open_async_service_client(base_url=url, timeout=60.0, headers=headers)

    async def register(self, config: RunConfig, *, first_step: int, checkpoint_dir: Path) -> None:
        """Reset the API, register, and fetch once.

        Environments are admitted only after the first fetch, and data sent before the registration
        would block the API permanently.

        Raises:
            ServerDownError: The API does not respond.
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
        # Environments can register only after the first request for a batch.
        await self._request("GET", "/batch")

    async def next_batch(self, step: int) -> list[ScoredGroup]:
        """Wait for a batch and return its groups.

        If the API is gone, wait for it; if it was restarted, register with the current `step`
        again.

        Raises:
            ServerDownError: There was no API for MAX_OUTAGE_S seconds.
        """
        pause_s, max_pause_s = POLL_INTERVALS_S
        answered_at = time.monotonic()
        while True:
            requested_at = time.monotonic()
            try:
                response = await self._request("GET", "/batch", wait=LONG_POLL_S)
                if response.get("status") == "error":  # The API was restarted and knows no trainer.
                    await self._register(step)
                    log.warning(
                        "the Atropos API was restarted; its queue is lost, and training continues"
                    )
                answered_at = time.monotonic()
            except ServerDownError:
                if time.monotonic() - answered_at > MAX_OUTAGE_S:
                    raise
                response = {}
            if response.get("batch"):
                return list(response["batch"])
            if time.monotonic() - requested_at < 1:  # The API does not support long polling.
                await asyncio.sleep(pause_s)
                pause_s = min(1.2 * pause_s, max_pause_s)

    async def read_queue_counts(self) -> dict[str, float]:
        """Return how many groups the API's guards dropped as old or refused since its start."""
        try:
            counts = await self._request("GET", "/counts")
        except ServerDownError:
            return {}
        return {
            f"queue/{name}": float(counts[name])
            for name in ("dropped", "refused")
            if name in counts
        }

    async def take_refused_groups(self) -> list[tuple[str, Any]]:
        """Return the reason and the content of the groups that the API has refused since the last
        call; content that is not JSON is returned as a string.
        """
        try:
            answer = await self._request("GET", "/refused")
        except ServerDownError:  # Another implementation of the API does not have this route.
            return []
        return [
            (str(refused["reason"]), _read_json_or_text(refused["group"]))
            for refused in answer.get("refused", ())
        ]

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None, **query: Any
    ) -> dict[str, Any]:
        """Send a request to the rollout API; return JSON, or raise ServerDownError."""
        try:
            response = await self._http.request(method, path, json=body, params=query or None)
        except httpx.HTTPError as error:
            raise ServerDownError(
                f"the Atropos API at {self.url} does not answer {path}: {type(error).__name__}"
            ) from error
        if response.status_code != 200:
            raise ServerDownError(
                f"the Atropos API responded to {path} with HTTP {response.status_code}: "
                f"{response.text[:300]}"
            )
        if not response.headers.get("content-type", "").startswith("application/json"):
            return {}  # /reset_data responds with a sentence.
        content: dict[str, Any] = await asyncio.to_thread(read_batch_json, response.content)
        return content


def _read_json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
