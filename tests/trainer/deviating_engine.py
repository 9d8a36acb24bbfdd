"""The embedded engine with one deviation at a time, as a process of its own.

The file `deviation` in its store names what it does in another way than Tinker; without the file it
deviates in nothing. Each is the way of some engine that speaks Tinker, or of one that is broken.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Generator, Set
from pathlib import Path
from typing import Any

import numpy as np

from lachesis.engine.embedded_engine import Engine
from lachesis.tinker_server import program, routes
from lachesis.tinker_server.futures import Payload
from lachesis.tinker_server.json_messages import SampleBody
from lachesis.tinker_server.model_description import LoraSpec
from lachesis.tinker_server.protobuf_messages import (
    DecodedDatum,
    ForwardBackwardRequest,
    decode_data,
    encode_forward_backward,
)
from lachesis.tinker_server.request_queue import RequestDispatcher

DEVIATION_FILE = "deviation"


class SpecOfGrowingAlpha(LoraSpec):
    """An adapter whose alpha is twice its rank."""

    @property
    def scale(self) -> float:
        return 2.0


class DeviatingEngine(Engine):
    """An engine that is told what to do wrongly."""

    base_sampler_ids: set[str]

    @property
    def deviation(self) -> str:
        """Return what the engine does wrongly now; an empty text stands for nothing."""
        file = self.store.root / DEVIATION_FILE
        return file.read_text() if file.exists() else ""

    def _add_model(
        self, session_id: str, model_seq_id: int, base: Any, spec: LoraSpec, metadata: Any
    ) -> str:
        if self.deviation == "growing_alpha":
            spec = SpecOfGrowingAlpha(**spec.as_dict())
        return super()._add_model(session_id, model_seq_id, base, spec, metadata)

    def create_model(
        self, session_id: str, model_seq_id: int, base_model: str, spec: LoraSpec, metadata: Any
    ) -> Payload:
        answer = super().create_model(session_id, model_seq_id, base_model, spec, metadata)
        if self.deviation == "adapters_begin_elsewhere":
            for _, up in self.models[answer["model_id"]].factors.values():
                up.data.fill_(0.02)
        return answer

    def forward_backward(self, request: ForwardBackwardRequest) -> Generator[None, None, Payload]:
        data = decode_data(request)
        if self.deviation == "mean_losses":
            data = [average_datum(datum, len(data)) for datum in data]
        logprobs_D, metrics = yield from self._get_model(request.model_id).forward_backward(
            data, request.loss_fn, request.loss_config, forward_only=request.forward_only
        )
        if self.deviation == "no_loss_sum":
            metrics = {}
        return encode_forward_backward(logprobs_D, metrics)

    def optim_step(self, model_id: str, adam_params: dict[str, Any]) -> Payload:
        if self.deviation == "updates_without_effect":
            adam_params = {**adam_params, "learning_rate": 0.0}
        answer = super().optim_step(model_id, adam_params)
        if self.deviation == "live_weights":
            self.show_adapter(model_id, self.samplers.keys() - self.base_sampler_ids)
        return answer

    def load_checkpoint(self, model_id: str, path: str, *, with_optimizer: bool) -> Payload:
        if self.deviation == "states_are_not_loaded":
            return {"path": path, "model_id": model_id}
        return super().load_checkpoint(model_id, path, with_optimizer=with_optimizer)

    def create_snapshot_sampler(self, model_id: str, sampling_seq_id: int) -> Payload:
        if self.deviation == "adapter_for_base":
            self.show_adapter(model_id, self.base_sampler_ids)
        return super().create_snapshot_sampler(model_id, sampling_seq_id)

    def add_sampler(self, session_id: str, seq_id: int, loaded: Any, model_path: Any) -> str:
        sampler_id = super().add_sampler(session_id, seq_id, loaded, model_path)
        if loaded[1] is None:
            self.base_sampler_ids.add(sampler_id)
        return sampler_id

    def show_adapter(self, model_id: str, sampler_ids: Set[str]) -> None:
        """Let clients sample the weights in training."""
        snapshot = self.models[model_id].snapshot()
        for sampler_id in sampler_ids & self.samplers.keys():
            self.samplers[sampler_id].snapshot = snapshot

    def load_into_training(self, sampler_id: str) -> None:
        """Put the weights of a sampling client over those in training."""
        snapshot = self.samplers[sampler_id].snapshot
        session_id = sampler_id.split(":", 1)[0]
        if snapshot is None:
            return
        for model_id, model in self.models.items():
            if model_id.startswith(f"{session_id}:"):
                for path, pair in model.factors.items():
                    for tensor, sampled in zip(pair, snapshot.factors[path], strict=True):
                        if tensor.shape == sampled.shape:
                            tensor.data.copy_(sampled)


def average_datum(datum: DecodedDatum, num_datums: int) -> DecodedDatum:
    """Return the datum with weights that make the sum of the losses a mean of means."""
    name = "weights" if "weights" in datum.inputs else "advantages"
    share = np.float32(1 / (len(datum.tokens) * num_datums))
    return DecodedDatum(datum.tokens, {**datum.inputs, name: datum.inputs[name] * share})


class DeviatingDispatcher(RequestDispatcher):
    """A dispatcher of the requests for samples to such an engine."""

    def submit_sample(self, body: SampleBody) -> dict[str, Any]:
        assert isinstance(self.engine, DeviatingEngine)
        deviation = self.engine.deviation
        if deviation == "old_clients_overwrite":
            self.engine.load_into_training(body.sampling_session_id)
        if deviation == "answers_without_end" and body.sampling_params.stop is None:
            body.sampling_params.stop = []
        answer = super().submit_sample(body)
        if deviation == "no_sequence_ids":
            answer.pop("sample_sequence_ids")
        return answer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--store", type=Path, required=True)
    args = parser.parse_args()
    routes.RequestDispatcher = DeviatingDispatcher  # type: ignore[misc]
    with program.bind_listener("127.0.0.1", args.port) as listener:
        engine = DeviatingEngine(args.model, args.store, seed=0)
        engine.base_sampler_ids = set()
        token = os.environ["LACHESIS_ENGINE_TOKEN"]
        program.serve_engine(engine, token, listener, host="127.0.0.1")


if __name__ == "__main__":
    main()
