"""JSON bodies of the Tinker protocol, as SDK 0.38 sends them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, StrictBool, StrictInt, ValidationError

from lachesis.base.errors import EngineRequestError
from lachesis.engine.futures import Future
from lachesis.engine.lora import LoraSpec
from lachesis.engine.model import BaseModel as LanguageModel
from lachesis.engine.protobuf_messages import tensor_of_json
from lachesis.engine.sample_request import PromptQuestions, SampleRequest

OLDEST_SDK = (0, 38)


class Body(BaseModel):
    """A JSON request; fields that this engine does not use are let through."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class CreateSession(Body):
    sdk_version: str | None = None
    user_metadata: dict[str, Any] | None = None


class LoraConfig(Body):
    """The adapter that a client asks for; None is the default."""

    rank: StrictInt | None = None
    seed: StrictInt | None = None
    train_attn: StrictBool | None = None
    train_mlp: StrictBool | None = None
    train_unembed: StrictBool | None = None


class CreateModel(Body):
    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: dict[str, Any] | None = None
    optimizer_config: dict[str, Any] | None = None
    user_metadata: dict[str, Any] | None = None

    def lora_spec(self) -> LoraSpec:
        """Return the adapter that is asked for; fields that this engine does not know are ignored.

        Raises:
            EngineRequestError: A field has the wrong type.
        """
        try:
            config = LoraConfig.model_validate(self.lora_config or {})
        except ValidationError as error:
            wrong = [f"lora_config.{problem['loc'][0]} is {problem['input']!r}: {problem['msg']}" for problem in error.errors()]
            raise EngineRequestError("; ".join(wrong)) from error
        return LoraSpec(**config.model_dump(include=set(LoraConfig.model_fields), exclude_none=True))


class OfModel(Body):
    model_id: str
    seq_id: int | None = None
    path: str | None = None


class OptimStep(OfModel):
    adam_params: dict[str, Any] | None = None
    optimizer_params: dict[str, Any] | None = None


class LoadWeights(Body):
    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    user_metadata: dict[str, Any] | None = None


class SaveForSampler(OfModel):
    sampling_session_seq_id: int | None = None


class CreateSampler(Body):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class Chunk(Body):
    type: str = "encoded_text"
    tokens: list[int] | None = None


class Prompt(Body):
    chunks: list[Chunk] = []


class SamplingParams(Body):
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None


class Sample(Body):
    sampling_session_id: str
    seq_id: int
    prompt: Prompt
    num_samples: int = 1
    sampling_params: SamplingParams
    prompt_logprobs: bool | None = False
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: int = 0

    def request(self, model: LanguageModel, future: Future) -> SampleRequest:
        """In the sampler's terms, checked. `stop` absent means the model's end-of-sequence tokens; token ids mean just those;
        strings mean those and end-of-sequence; an empty list means none at all. Raises EngineRequestError."""
        if any(chunk.type != "encoded_text" or chunk.tokens is None for chunk in self.prompt.chunks):
            raise EngineRequestError("the prompt holds a chunk that is not text; this engine samples from text tokens only")
        params = self.sampling_params
        words = [params.stop] if isinstance(params.stop, str) else params.stop
        strings = tuple(one for one in words or () if isinstance(one, str))
        if "" in strings:
            raise EngineRequestError("a stop string is empty; allowed: texts of at least one character, or token ids")
        ids = frozenset(one for one in words or () if isinstance(one, int))
        request = SampleRequest(
            prompt=[token for chunk in self.prompt.chunks for token in chunk.tokens or ()],
            num_samples=self.num_samples,
            max_tokens=params.max_tokens,
            temperature=1.0 if params.temperature is None else params.temperature,
            top_p=1.0 if params.top_p is None else params.top_p,
            top_k=-1 if params.top_k is None else params.top_k,
            seed=params.seed,
            stop_tokens=ids | model.eos_ids if words is None or strings else ids,
            stop_strings=strings,
            top_k_logprobs=self.topk_sample_logprobs,
            questions=self._questions(),
            cancelled=lambda: future.cancelled,
        )
        request.check(model.context, model.vocabulary)
        return request

    def _questions(self) -> PromptQuestions:
        targets = self.target_prompt_logprobs
        return PromptQuestions(
            logprobs=bool(self.prompt_logprobs),
            last_n=self.prompt_logprobs_last_n,
            top_k=self.topk_prompt_logprobs,
            targets=None if targets is None else tensor_of_json("target_prompt_logprobs", targets),
            alternatives=self.prompt_alt_tokens_k,
        )


class Retrieve(Body):
    request_id: str


def check_sdk(version: str | None) -> None:
    """Raises EngineRequestError for a client that speaks an older protocol: it would wait for answers in another form."""
    try:
        known = tuple(int(part) for part in (version or "").split(".")[:2])
    except ValueError:
        return
    if len(known) == 2 and known < OLDEST_SDK:
        raise EngineRequestError(
            f"this is tinker {version}, which speaks an older protocol; allowed: {'.'.join(map(str, OLDEST_SDK))} or newer "
            "(pip install -U tinker)"
        )
