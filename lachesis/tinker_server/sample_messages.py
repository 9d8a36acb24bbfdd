"""Describe a sampling request and its result, whichever engine serves it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from lachesis.base.arrays import Array
from lachesis.base.errors import EngineRequestError

never_cancelled: Callable[[], bool] = lambda: False  # noqa: E731
MAX_TOP_K = 1024
MAX_SAMPLES_PER_REQUEST = 4096
# Token ids and log-probabilities (positions, k), the most likely first; 0 and -99999 if missing.
TopLogprobs = tuple[Array, Array]
MISSING_LOGPROB = -99999.0


@dataclass(frozen=True)
class PromptLogprobsSpec:
    """Describe the requested log-probabilities of each prompt token except the first.

    Log-probabilities are natural and at temperature 1; only the alternatives are drawn at the
    request's temperature.
    """

    include_logprobs: bool = False
    last_n: int | None = None
    """Only for this many tokens at the end of the prompt."""
    num_top_logprobs: int = 0
    target_ids: Array | None = None
    """(P - 1, K) token ids to score, -1 for none."""
    num_alternatives: int = 0
    """Number of tokens to draw at each position."""

    def __bool__(self) -> bool:
        return (
            self.include_logprobs
            or self.num_top_logprobs > 0
            or self.target_ids is not None
            or self.num_alternatives > 0
        )


@dataclass(frozen=True)
class SampleRequest:
    """Request `num_samples` continuations of `prompt`.

    The log-probability of a sampled token is that under the temperature-scaled distribution before
    top-p and top-k are applied; temperature 0 is greedy, with unscaled log-probabilities.
    """

    prompt: list[int]
    num_samples: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    num_top_logprobs: int = 0
    """Number of most likely tokens to return at each sampled position."""
    prompt_logprobs_spec: PromptLogprobsSpec = field(default_factory=PromptLogprobsSpec)
    is_cancelled: Callable[[], bool] = never_cancelled

    def check(self, context_length: int, vocab_size: int) -> None:
        """Raise EngineRequestError with the limit that a request exceeds."""
        if not self.prompt:
            raise EngineRequestError("the prompt is empty; at least one token is needed")
        if len(self.prompt) >= context_length:
            raise EngineRequestError(
                f"the prompt has {len(self.prompt)} tokens; the context of the model holds "
                f"{context_length}"
            )
        if not 0 <= min(self.prompt) <= max(self.prompt) < vocab_size:
            raise EngineRequestError(
                f"the prompt has a token id outside the vocabulary (0 to {vocab_size - 1})"
            )
        if not 1 <= self.num_samples <= MAX_SAMPLES_PER_REQUEST or (
            self.max_tokens is not None and self.max_tokens < 1
        ):
            raise EngineRequestError(
                f"num_samples is {self.num_samples} and max_tokens is {self.max_tokens}; both must "
                f"be at least 1, and num_samples at most {MAX_SAMPLES_PER_REQUEST}"
            )
        if not 0 <= self.temperature < float("inf") or not 0 < self.top_p <= 1:
            raise EngineRequestError(
                f"temperature is {self.temperature}, top_p is {self.top_p}; allowed: "
                "temperature >= 0, 0 < top_p <= 1"
            )
        self._check_prompt_logprobs_spec(vocab_size)

    def _check_prompt_logprobs_spec(self, vocab_size: int) -> None:
        """Raise EngineRequestError unless the log-probabilities of the prompt can be computed."""
        spec, num_positions = self.prompt_logprobs_spec, len(self.prompt) - 1
        for name, k in (
            ("topk_sample_logprobs", self.num_top_logprobs),
            ("topk_prompt_logprobs", spec.num_top_logprobs),
            ("prompt_alt_tokens_k", spec.num_alternatives),
        ):
            if name == "prompt_alt_tokens_k":
                max_k = MAX_TOP_K
            else:
                max_k = min(MAX_TOP_K, vocab_size)
            if not 0 <= k <= max_k:
                raise EngineRequestError(f"{name} is {k}; allowed: 0 to {max_k}")
        if spec.last_n is not None and not 1 <= spec.last_n <= num_positions:
            raise EngineRequestError(
                f"prompt_logprobs_last_n is {spec.last_n}; allowed: 1 to {num_positions} for this "
                "prompt"
            )
        if spec.target_ids is not None:
            if not num_positions:
                raise EngineRequestError(
                    "target_prompt_logprobs needs a prompt of at least 2 tokens, because the first "
                    "token has no distribution before it; this one has 1"
                )
            shape = spec.target_ids.shape
            if len(shape) != 2 or shape[0] != num_positions or not 1 <= shape[1] <= MAX_TOP_K:
                raise EngineRequestError(
                    f"target_prompt_logprobs has shape {shape}; allowed: ({num_positions}, 1 to "
                    f"{MAX_TOP_K})"
                )
            if (
                spec.target_ids.min() < -1
                or spec.target_ids.max() >= vocab_size
                or spec.target_ids.max() < 0
            ):
                raise EngineRequestError(
                    "target_prompt_logprobs is empty or has a token id outside the vocabulary (0 "
                    f"to {vocab_size - 1}; -1 for none)"
                )


@dataclass
class PromptLogprobs:
    """Hold the log-probabilities of a prompt of P tokens; the first token has none."""

    logprobs: Array | None = None
    """(P,) with NaN where nothing was requested."""
    top_logprobs: TopLogprobs | None = None
    """(P, k)."""
    target_logprobs: Array | None = None
    """(P - 1, K), 0 where the target was -1."""
    alternatives: tuple[Array, Array] | None = None
    """Token ids and log-probabilities, (P - 1, k)."""


@dataclass
class SampledSequence:
    """Hold one sample; `stopped` is false if the length limit has truncated it."""

    tokens: list[int]
    logprobs: list[float]
    has_stopped: bool
    top_logprobs: TopLogprobs | None = None


@dataclass
class SampleResponse:
    """Hold the result of a request."""

    sequences: list[SampledSequence]
    prompt_logprobs: PromptLogprobs = field(default_factory=PromptLogprobs)
