"""Count what the rehearsal cloud's clients use, as the bill of the real service does.

Three kinds of tokens are billed: `prefill` (a prompt, once per request however many answers it
gets), `sample` (answers) and `train` (sequences of forward-backward passes). A forward pass alone
is a prefill. Kept checkpoints are billed by size and time. What was sent twice, because its answer
was lost, is billed once; so is nothing that failed or was cancelled.
"""

import collections
import json
import time
from dataclasses import dataclass, field
from typing import Any

from tinker.proto import tinker_public_pb2 as messages

from lachesis.config.prices import TokenCounts, find_prices

KEPT_FOREVER_S = float("inf")


@dataclass
class PendingSample:
    """Hold a sampling request that has no result yet."""

    model: str
    prompt_tokens: int


@dataclass
class Bill:
    """Count the calls by path, and the tokens by model."""

    calls: collections.Counter[str] = field(default_factory=collections.Counter)
    tokens: dict[str, TokenCounts] = field(default_factory=dict)
    failed_samples: int = 0
    checkpoints: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Size in bytes and time of saving of each checkpoint by its path."""
    _models: dict[str, str] = field(default_factory=dict)
    """The base model of each training model and each sampler, by id."""
    _pending: dict[str, PendingSample] = field(default_factory=dict)
    _billed: set[tuple[str, int]] = field(default_factory=set)

    def record(self, path: str, body: bytes, status: int, answer: bytes) -> None:
        """Count one call with its answer."""
        self.calls[path.split("/")[0]] += 1
        handler = getattr(self, f"_record_{path}", None)
        if status == 200 and handler:
            handler(body, answer)

    def compute_cost(self) -> float:
        """Return the cost of all tokens in US dollars by `prices.yaml`."""
        total = 0.0
        for model, tokens in self.tokens.items():
            prices = find_prices(model)
            assert prices is not None, f"no price of {model} is known"
            total += prices.compute_cost(tokens)
        return total

    def to_json(self) -> dict[str, Any]:
        """Return everything that was counted."""
        return {
            "calls": dict(self.calls),
            "tokens": {model: tokens.model_dump() for model, tokens in self.tokens.items()},
            "failed_samples": self.failed_samples,
            "checkpoints": len(self.checkpoints),
            "checkpoint_bytes": sum(size for size, _ in self.checkpoints.values()),
            "cost_usd": self.compute_cost(),
        }

    def get_base_model(self, training_or_sampler_id: str) -> str:
        """Return the base model of a training model or a sampler."""
        return self._models[training_or_sampler_id]

    # --- which model a call is about

    def _record_create_model(self, body: bytes, answer: bytes) -> None:
        fields = json.loads(body)
        model_id = f"{fields['session_id']}:train:{fields['model_seq_id']}"
        self._models[model_id] = fields["base_model"]

    def _record_load_weights(self, body: bytes, answer: bytes) -> None:
        fields = json.loads(body)
        if fields.get("session_id"):
            model_id = f"{fields['session_id']}:train:{fields['model_seq_id']}"
            self._models[model_id] = self._models[_get_run(fields["path"])]

    def _record_save_weights_for_sampler(self, body: bytes, answer: bytes) -> None:
        fields = json.loads(body)
        sequence_id = fields.get("sampling_session_seq_id")
        if sequence_id is not None:
            session_id = fields["model_id"].split(":")[0]
            sampler_id = f"{session_id}:sample:{sequence_id}"
            self._models[sampler_id] = self._models[fields["model_id"]]

    def _record_create_sampling_session(self, body: bytes, answer: bytes) -> None:
        fields = json.loads(body)
        if fields.get("model_path"):
            model = self._models[_get_run(fields["model_path"])]
        else:
            model = fields["base_model"]
        self._models[json.loads(answer)["sampling_session_id"]] = model

    # --- tokens

    def _record_asample(self, body: bytes, answer: bytes) -> None:
        fields = json.loads(body)
        prompt_tokens = sum(len(chunk["tokens"]) for chunk in fields["prompt"]["chunks"])
        model = self._models[fields["sampling_session_id"]]
        key = (fields["sampling_session_id"], fields["seq_id"])
        if key not in self._billed:
            self._billed.add(key)
            request_id = json.loads(answer)["request_id"]
            self._pending[request_id] = PendingSample(model, prompt_tokens)

    def _record_retrieve_future(self, body: bytes, answer: bytes) -> None:
        request_id = json.loads(body)["request_id"]
        if request_id not in self._pending:
            return
        if answer.startswith(b"{"):
            if b'"error"' in answer:
                self.failed_samples += 1
                del self._pending[request_id]
            return
        sample = self._pending.pop(request_id)
        sampled = sum(len(one.tokens) // 4 for one in parse_sample(answer).sequences)
        self._add(sample.model, prefill=sample.prompt_tokens, sampled=sampled)

    def _record_forward_backward(self, body: bytes, answer: bytes) -> None:
        request = messages.ForwardBackwardRequest()
        request.ParseFromString(body)
        key = (request.model_id, request.seq_id)
        if key in self._billed:
            return
        self._billed.add(key)
        num_tokens = sum(
            len(chunk.encoded_text.tokens) // 4
            for datum in request.data
            for chunk in datum.model_input
        )
        kind = "prefill" if request.forward_only else "trained"
        self._add(self._models[request.model_id], **{kind: num_tokens})

    def _add(self, model: str, **tokens: int) -> None:
        counts = self.tokens.setdefault(model, TokenCounts())
        for kind, number in tokens.items():
            setattr(counts, kind, getattr(counts, kind) + number)

    # --- checkpoints

    def record_checkpoint(self, path: str, size_bytes: int) -> None:
        """Count a checkpoint that was saved."""
        self.checkpoints.setdefault(path, (size_bytes, time.time()))


def parse_sample(answer: bytes) -> Any:
    """Return the message of a sampling request's result."""
    message = messages.SampleResponse()
    message.ParseFromString(answer)
    return message


def _get_run(path: str) -> str:
    """Return the id of the training model that a `tinker://` path names."""
    return path.removeprefix("tinker://").split("/")[0]
