"""Count the requests of an environment for samples, their tokens, and those that failed."""

from __future__ import annotations

import contextvars
import functools
import time
from typing import TYPE_CHECKING, Any

from lachesis.environment_toolkit.failure_reasons import is_unanswered

if TYPE_CHECKING:
    from atroposlib.envs.server_handling.server_baseline import APIServer

    from lachesis.environment_process.rollout_counters import RolloutCounters

# Failed requests of the current group.
#
# An environment that treats a failure of the server as a bad answer would score it 0; such a group
# is invalid instead.
failed_requests: contextvars.ContextVar[list[str]] = contextvars.ContextVar("failed_requests")

# Whether requests are not training's own, as those of an evaluation beside it: what they wait for
# is no sign of a stall.
is_evaluation_request: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "uncounted", default=False
)


def install_request_counters(counters: RolloutCounters) -> None:
    """Count requests, tokens, and truncated completions.

    A failed request also counts as lost if no response came, but not if the server has refused it.
    """
    from atroposlib.envs.server_handling.server_baseline import APIServer

    for name in ("chat_completion", "completion", "tokens_and_logprobs_completion"):
        original = getattr(APIServer, name)

        @functools.wraps(original)
        async def call(self: APIServer, _original: Any = original, **options: Any) -> Any:
            """Sample, and count the request with its tokens, time and failure."""
            if is_evaluation_request.get():
                return await _original(self, **options)
            started = time.monotonic()
            try:
                with counters.track_in_progress("request"):
                    response = await _original(self, **options)
            except Exception as error:
                counters.counts["failed_requests"] += 1
                counters.counts["lost_requests"] += is_unanswered(error)
                failed_requests.get([]).append(f"{type(error).__name__}: {error}")
                raise
            counters.counts["sampling_s"] += time.monotonic() - started
            counters.counts["requests"] += 1
            _count_completions(counters, response)
            return response

        setattr(APIServer, name, call)


def _count_completions(counters: RolloutCounters, response: Any) -> None:
    """Add the prompt, sampled and truncated tokens of an answer to the counts."""
    # The tuple holds prompt ids, ids per completion, log-probabilities and finish reasons.
    if isinstance(response, tuple):
        prompt, completions, _, finish_reasons = response
        lengths = (len(prompt), sum(map(len, completions)))
    else:
        finish_reasons = [choice.finish_reason for choice in response.choices]
        usage = getattr(response, "usage", None)
        lengths = (
            getattr(usage, "prompt_tokens", 0) or 0,
            getattr(usage, "completion_tokens", 0) or 0,
        )
    counters.counts["prompt_tokens"] += lengths[0]
    counters.counts["sampled_tokens"] += lengths[1]
    counters.counts["completions"] += len(finish_reasons)
    counters.counts["truncated"] += sum(reason == "length" for reason in finish_reasons)
