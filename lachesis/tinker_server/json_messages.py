"""Define the JSON bodies of the Tinker protocol as the SDKs 0.27 to 0.38 send them."""

from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, StrictBool, StrictInt, ValidationError

from lachesis.base.errors import EngineRequestError
from lachesis.tinker_server.futures import RequestFuture
from lachesis.tinker_server.model_description import LoraSpec
from lachesis.tinker_server.protobuf_messages import parse_json_tensor
from lachesis.tinker_server.sample_messages import PromptLogprobsSpec, SampleRequest

MIN_SDK_VERSION = (0, 27)
# The settings of an optimizer step and their defaults.
ADAM_DEFAULTS = {
    "learning_rate": 1e-4,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}


class ModelLimits(Protocol):
    """Hold the limits that the requests to a model are checked against."""

    @property
    def context_length(self) -> int:
        """Return the number of tokens of the longest sequence."""

    @property
    def vocab_size(self) -> int:
        """Return the number of token ids."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Return the ids of the tokens that end an answer."""


class RequestBody(BaseModel):
    """Base of JSON requests; fields that this engine does not use are ignored."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class CreateSessionBody(RequestBody):
    """Start a session of a client."""

    sdk_version: str | None = None
    user_metadata: dict[str, Any] | None = None


class LoraConfigBody(RequestBody):
    """Describe the adapter that a client requests; None means the default."""

    rank: StrictInt | None = None
    seed: StrictInt | None = None
    train_attn: StrictBool | None = None
    train_mlp: StrictBool | None = None
    train_unembed: StrictBool | None = None


class CreateModelBody(RequestBody):
    """Create an adapter for training."""

    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: dict[str, Any] | None = None
    optimizer_config: dict[str, Any] | None = None
    user_metadata: dict[str, Any] | None = None

    def to_lora_spec(self) -> LoraSpec:
        """Return the requested adapter; fields that this engine does not know are ignored.

        Raises:
            EngineRequestError: A field has the wrong type.
        """
        try:
            config = LoraConfigBody.model_validate(self.lora_config or {})
        except ValidationError as error:
            messages = [
                f"lora_config.{problem['loc'][0]} is {problem['input']!r}: {problem['msg']}"
                for problem in error.errors()
            ]
            raise EngineRequestError("; ".join(messages)) from error
        return LoraSpec(
            **config.model_dump(include=set(LoraConfigBody.model_fields), exclude_none=True)
        )


class ModelBody(RequestBody):
    """Name a model in training, and the sequence id of a request for it."""

    model_id: str
    seq_id: int | None = None
    path: str | None = None


class OptimStepBody(ModelBody):
    """Take an optimizer step."""

    adam_params: dict[str, Any] | None = None
    optimizer_params: dict[str, Any] | None = None


class LoadWeightsBody(RequestBody):
    """Load a checkpoint into a model."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    user_metadata: dict[str, Any] | None = None


class SaveForSamplerBody(ModelBody):
    """Save the weights of a model for sampling."""

    sampling_session_seq_id: int | None = None


class CreateSamplerBody(RequestBody):
    """Create a sampler from a base model or a checkpoint."""

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class Chunk(RequestBody):
    """Hold a part of a prompt."""

    type: str = "encoded_text"
    tokens: list[int] | None = None


class Prompt(RequestBody):
    """Hold the chunks of a prompt."""

    chunks: list[Chunk] = []


class SamplingParams(RequestBody):
    """Hold the parameters of sampling."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None


class SampleBody(RequestBody):
    """Hold the body of a sampling request."""

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

    def to_sample_request(self, model: ModelLimits, future: RequestFuture) -> SampleRequest:
        """Return the checked request in the sampler's terms.

        Without `stop`, the model's end-of-sequence tokens stop a sample. Token ids replace them,
        strings are added to them, and an empty list means that only the length limit stops a
        sample.

        Raises:
            EngineRequestError: The request cannot be served.
        """
        if any(
            chunk.type != "encoded_text" or chunk.tokens is None for chunk in self.prompt.chunks
        ):
            raise EngineRequestError(
                "the prompt contains a chunk that is not text; this engine samples from text "
                "tokens only"
            )
        params = self.sampling_params
        stops = [params.stop] if isinstance(params.stop, str) else params.stop
        stop_strings = tuple(stop for stop in stops or () if isinstance(stop, str))
        if "" in stop_strings:
            raise EngineRequestError(
                "a stop string is empty; allowed: texts of at least one character, or token ids"
            )
        # Other ids are never sampled, and a larger number would not fit into the batch's tensor.
        stop_ids = frozenset(
            stop for stop in stops or () if isinstance(stop, int) and 0 <= stop < model.vocab_size
        )
        request = SampleRequest(
            prompt=[token for chunk in self.prompt.chunks for token in chunk.tokens or ()],
            num_samples=self.num_samples,
            max_tokens=params.max_tokens,
            temperature=1.0 if params.temperature is None else params.temperature,
            top_p=1.0 if params.top_p is None else params.top_p,
            top_k=-1 if params.top_k is None else max(-1, min(params.top_k, model.vocab_size)),
            seed=params.seed,
            stop_tokens=stop_ids | model.eos_ids if stops is None or stop_strings else stop_ids,
            stop_strings=stop_strings,
            num_top_logprobs=self.topk_sample_logprobs,
            prompt_logprobs_spec=self._to_prompt_logprobs_spec(),
            is_cancelled=lambda: future.is_cancelled,
        )
        request.check(model.context_length, model.vocab_size)
        return request

    def _to_prompt_logprobs_spec(self) -> PromptLogprobsSpec:
        """Return which log-probabilities of the prompt the request wants."""
        targets = self.target_prompt_logprobs
        return PromptLogprobsSpec(
            include_logprobs=bool(self.prompt_logprobs),
            last_n=self.prompt_logprobs_last_n,
            num_top_logprobs=self.topk_prompt_logprobs,
            target_ids=None
            if targets is None
            else parse_json_tensor("target_prompt_logprobs", targets),
            num_alternatives=self.prompt_alt_tokens_k,
        )


class RetrieveBody(RequestBody):
    """Name a request whose result is fetched or which is cancelled."""

    request_id: str


def describe_base_model(name: str, context_length: int) -> dict[str, Any]:
    """Return a base model as the protocol describes it."""
    return {
        "model_name": name,
        "max_context_length": context_length,
        "trainable": True,
        "sampleable": True,
    }


def describe_adapter(
    model_id: str, base_model: str, rank: int, architecture: str
) -> dict[str, Any]:
    """Return a model in training as the protocol describes it."""
    return {
        "type": "get_info",
        "model_id": model_id,
        "model_data": {"arch": architecture, "model_name": base_model, "tokenizer_id": base_model},
        "is_lora": True,
        "lora_rank": rank,
        "model_name": base_model,
        "optimizer_config": {"type": "adamw"},
    }


def check_sdk_version(version: str | None) -> None:
    """Refuse clients of an older protocol, which would wait for responses in another format.

    Raises:
        EngineRequestError: The version is too old.
    """
    try:
        major_minor = tuple(int(part) for part in (version or "").split(".")[:2])
    except ValueError:
        return
    if len(major_minor) == 2 and major_minor < MIN_SDK_VERSION:
        raise EngineRequestError(
            f"the client is tinker {version}, which speaks an older protocol; allowed: "
            f"{'.'.join(map(str, MIN_SDK_VERSION))} or newer (pip install -U tinker)"
        )
