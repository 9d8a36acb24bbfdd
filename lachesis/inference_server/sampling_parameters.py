"""Define the bodies of sampling requests, and refuse parameters that are not supported.

A parameter that would change the samples and is not supported is refused, except with the value
that turns it off, which many clients send. Names are those of OpenAI, vLLM and SGLang. null always
means that a parameter is not set.
"""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from lachesis.base.errors import shorten
from lachesis.base.json_text import Json

# Maximum number of samples per request; Atropos' clients request eight at a time.
MAX_SAMPLES = 512
# Parameters that do not change the samples, whatever their value.
IGNORED_PARAMETERS = frozenset(
    [
        "model",
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
        "priority",
        "request_id",
        "rid",
        "cache_salt",
        "detokenize",
        "parallel_tool_calls",
        "return_logprob",
        "return_text_in_logprobs",
    ]
)
# Parameters that are not supported, with the values that turn them off. Atropos sends `reasoning`
# if an environment sets `thinking_mode`; here the chat template of the model decides.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (0, 1, False),
    "top_logprobs": (0,),
    "top_logprobs_num": (0,),
    "logprob_start_len": (-1,),
    "return_hidden_states": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "min_new_tokens": (0,),
    "typical_p": (1,),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "include_stop_str_in_output": (True,),
    "no_stop_trim": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (-1,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "reasoning": ({}, {"enabled": True}),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}


class BadRequestError(Exception):
    """The client's request is wrong; the response has status 400."""


def refuse_unsupported(
    parameters: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]] = NEUTRAL_VALUES
) -> None:
    """Raise BadRequestError for a parameter that would be ignored.

    Args:
        parameters: Names and values in a request.
        allowed: Values that each parameter may have.
    """
    for name, value in parameters.items():
        if value is None or name in IGNORED_PARAMETERS or value in allowed.get(name, ()):
            continue
        if name not in allowed:
            raise BadRequestError(
                f"{shorten(name, 60)} is not a parameter of this request; leave it out"
            )
        choices = " or ".join(map(json.dumps, (*allowed[name], None)))
        text = shorten(repr(value), 60)
        raise BadRequestError(f"{name} is {text}, which is not supported here; allowed: {choices}")


class SamplingSettings(BaseModel):
    """Hold sampling settings under their OpenAI names."""

    model_config = ConfigDict(extra="allow")

    n: int = Field(1, ge=1, le=MAX_SAMPLES)
    max_tokens: int | None = None
    temperature: float | None = Field(None, allow_inf_nan=False)
    top_p: float | None = Field(None, allow_inf_nan=False)
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None

    def require_supported(self) -> None:
        """Raise BadRequestError for a parameter that is not supported."""
        parameters = dict(self.model_extra or {})
        # OpenAI's client unpacks `extra_body`, but Atropos passes it on as it is.
        extra_body = parameters.pop("extra_body", None)
        refuse_unsupported(extra_body if isinstance(extra_body, dict) else {})
        refuse_unsupported(parameters)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise BadRequestError(
                f"max_tokens is {self.max_tokens}; allowed: at least 1, or null for the longest "
                f"answer"
            )

    @property
    def stop_texts(self) -> list[str]:
        """Return the stop texts."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in stop if isinstance(text, str) and text]

    @property
    def stop_ids(self) -> list[int]:
        """Return the token ids at which an answer ends, from `stop` and `stop_token_ids`."""
        stop = self.stop if isinstance(self.stop, list) else []
        return [*(token for token in stop if isinstance(token, int)), *(self.stop_token_ids or [])]


class CompletionRequest(SamplingSettings):
    """Request completions in OpenAI's format."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = None

    def require_supported(self) -> None:
        super().require_supported()
        refuse_unsupported({"logprobs": self.logprobs}, {"logprobs": (0,)})


class ChatRequest(SamplingSettings):
    """Request chat completions in OpenAI's format."""

    messages: list[Json]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None

    def to_settings(self) -> SamplingSettings:
        """Return the settings with the limit under its general name.

        Raises:
            BadRequestError: There are two different limits.
        """
        both = (self.max_tokens, self.max_completion_tokens)
        limits = {limit for limit in both if limit is not None}
        if len(limits) > 1:
            raise BadRequestError(
                f"max_tokens is {self.max_tokens} and max_completion_tokens is "
                f"{self.max_completion_tokens}; allowed: one of them"
            )
        return self.model_copy(update={"max_tokens": next(iter(limits), None)})


class GenerateRequest(BaseModel):
    """Request samples in the format of vLLM or SGLang."""

    model_config = ConfigDict(extra="allow")

    prompt: Json | str | None = None
    input_ids: list[int] | None = None
    text: str | None = None
    sampling_params: Json = {}
    prompt_logprobs: int | None = None

    def to_vllm_settings(self) -> SamplingSettings:
        """Return the settings, which are beside the prompt."""
        other_parameters = {
            "sampling_params": self.sampling_params,
            "prompt_logprobs": self.prompt_logprobs,
        }
        refuse_unsupported(other_parameters, {"sampling_params": ({},), "prompt_logprobs": (0, 1)})
        return SamplingSettings.model_validate(self.model_extra or {})

    def to_sglang_settings(self) -> SamplingSettings:
        """Return the settings, which are in `sampling_params`."""
        other_parameters = {"prompt": self.prompt, "prompt_logprobs": self.prompt_logprobs}
        prompt_logprobs_off = {"logprob_start_len": (-1, len(self.input_ids or ()))}
        refuse_unsupported(
            {**(self.model_extra or {}), **other_parameters},
            {**NEUTRAL_VALUES, **prompt_logprobs_off},
        )
        settings = dict(self.sampling_params)
        limit = settings.pop("max_new_tokens", None)
        return SamplingSettings.model_validate(
            settings if limit is None else {**settings, "max_tokens": limit}
        )


class LogprobsRequest(BaseModel, extra="allow"):
    """Request the log-probabilities of token ids, a string or a conversation."""

    input_ids: list[int] | None = None
    prompt: str | None = None
    messages: list[Json] | None = None
