"""The embedded engine with deviations, as a process of its own: the list of all that servers of
other makers, or broken ones, do in another way than Tinker.

The file `deviation` in its store names what it does wrongly now; without the file it deviates in
nothing. With `--older` it has the ways of SkyRL's JAX engine, which the bridge translates: it
averages losses, ignores clipping, keeps no snapshots, ends no answer by itself, leaves out what
today's SDK needs, and loads weights into new adapters only.
"""

import argparse
import collections
import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Generator, Set
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI
from fastapi.responses import Response

from lachesis.base.errors import EngineRequestError
from lachesis.engine import model_thread
from lachesis.engine.embedded_engine import Engine
from lachesis.tinker_server import program, routes
from lachesis.tinker_server.checkpoint_store import CheckpointPath
from lachesis.tinker_server.futures import Payload
from lachesis.tinker_server.json_messages import SampleBody
from lachesis.tinker_server.model_description import LoraSpec
from lachesis.tinker_server.protobuf_messages import (
    MESSAGE_CLASSES,
    DecodedDatum,
    ForwardBackwardRequest,
    decode_data,
    encode_forward_backward,
    encode_sample_response,
)
from lachesis.tinker_server.request_queue import RequestDispatcher
from lachesis.tinker_server.sample_messages import SampleResponse

DEVIATION_FILE = "deviation"
OLDER = frozenset({"no_clipping", "answers_without_end", "no_sequence_ids", "short_logprobs"})
"""The deviations of the older engine that have a name of their own."""


class SpecOfGrowingAlpha(LoraSpec):
    """An adapter whose alpha is twice its rank."""

    @property
    def scale(self) -> float:
        return 2.0


class DeviatingEngine(Engine):
    """An engine that is told what to do wrongly."""

    always: Set[str] = frozenset()

    def __init__(self, model: str, store_root: Path) -> None:
        super().__init__(model, store_root, seed=0)
        self.base_sampler_ids = set[str]()

    def deviates(self, name: str) -> bool:
        """Return whether the engine does this wrongly now."""
        file = self.store.root / DEVIATION_FILE
        return name in self.always or (file.exists() and file.read_text() == name)

    def _add_model(
        self, session_id: str, model_seq_id: int, base: Any, spec: LoraSpec, metadata: Any
    ) -> str:
        if self.deviates("growing_alpha"):
            spec = SpecOfGrowingAlpha(**spec.as_dict())
        return super()._add_model(session_id, model_seq_id, base, spec, metadata)

    def create_model(
        self, session_id: str, model_seq_id: int, base_model: str, spec: LoraSpec, metadata: Any
    ) -> Payload:
        answer = super().create_model(session_id, model_seq_id, base_model, spec, metadata)
        if self.deviates("adapters_begin_elsewhere"):
            for _, up in self.models[answer["model_id"]].factors.values():
                up.data.fill_(0.02)
        return answer

    def forward_backward(self, request: ForwardBackwardRequest) -> Generator[None, None, Payload]:
        data = decode_data(request)
        if self.deviates("mean_losses"):
            data = [scale_losses(datum, len(datum.tokens) * len(data)) for datum in data]
        logprobs_D, metrics = yield from self._get_model(request.model_id).forward_backward(
            data, request.loss_fn, request.loss_config, forward_only=request.forward_only
        )
        metrics = {} if self.deviates("no_loss_sum") else metrics
        return encode_forward_backward(logprobs_D, metrics)

    def optim_step(self, model_id: str, adam_params: dict[str, Any]) -> Payload:
        if self.deviates("updates_without_effect"):
            adam_params = {**adam_params, "learning_rate": 0.0}
        if self.deviates("no_clipping"):
            adam_params.pop("grad_clip_norm", None)
        answer = super().optim_step(model_id, adam_params)
        if self.deviates("live_weights"):
            self.show_adapter(model_id, self.samplers.keys() - self.base_sampler_ids)
        return answer

    def load_checkpoint(self, model_id: str, path: str, *, with_optimizer: bool) -> Payload:
        if self.deviates("states_are_not_loaded"):
            return {"path": path, "model_id": model_id}
        return super().load_checkpoint(model_id, path, with_optimizer=with_optimizer)

    def create_snapshot_sampler(self, model_id: str, sampling_seq_id: int) -> Payload:
        if self.deviates("adapter_for_base"):
            self.show_adapter(model_id, self.base_sampler_ids)
        if self.deviates("live_samplers"):
            self.show_adapter(model_id, self.samplers.keys() - self.base_sampler_ids)
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


class OlderEngine(DeviatingEngine):
    """An engine that means something else by most words, as SkyRL's does."""

    always = OLDER
    states_folder: Path | None = None
    """Where states lie as SkyRL keeps them, which the bridge takes and gives back."""

    def __init__(self, model: str, store_root: Path) -> None:
        super().__init__(model, store_root)
        self.num_datums: collections.Counter[str] = collections.Counter()
        self.num_requests: collections.Counter[str] = collections.Counter()

    def forward_backward(self, request: ForwardBackwardRequest) -> Generator[None, None, Payload]:
        """Average the losses of a datum over its tokens, and give the loss of each token."""
        self.num_requests[request.model_id] += 1
        data = decode_data(request)
        config = dict(request.loss_config)
        if request.loss_fn == "cispo":
            config = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, **config}
        averaged = [scale_losses(datum, max(1, len(datum.tokens))) for datum in data]
        logprobs_D, _ = yield from self._get_model(request.model_id).forward_backward(
            averaged, request.loss_fn, config, forward_only=request.forward_only
        )
        if not request.forward_only:
            self.num_datums[request.model_id] += len(data)
        message = MESSAGE_CLASSES["ForwardBackwardOutput"]()
        message.ParseFromString(encode_forward_backward(logprobs_D, {}))
        entry = message.loss_fn_outputs[0].fields.add(key="elementwise_loss")
        entry.value.CopyFrom(message.loss_fn_outputs[0].fields[0].value)
        entry.value.data = b"".join(
            compute_losses(request.loss_fn, config, datum, logprobs).astype("<f4").tobytes()
            for datum, logprobs in zip(data, logprobs_D, strict=True)
        )
        return bytes(message.SerializeToString())

    def optim_step(self, model_id: str, adam_params: dict[str, Any]) -> Payload:
        self.num_requests[model_id] += 1
        gradient = self._get_model(model_id)._gradient
        gradient.div_(max(1, self.num_datums.pop(model_id, 1)))
        metrics = super().optim_step(model_id, adam_params)["metrics"]
        (norm,) = (value for name, value in metrics.items() if name.endswith("grad_norm"))
        return {"metrics": {"older.ai/grad_norm": norm}}

    def load_checkpoint(self, model_id: str, path: str, *, with_optimizer: bool) -> Payload:
        if self.num_requests[model_id]:
            raise EngineRequestError("LoadWeights is not permitted after other requests")
        place = CheckpointPath.parse(path)
        if self.states_folder and place.kind == "weights":  # It may have been replaced.
            folder = self.store.find_folder(place)
            shutil.copytree(self.find_state(place), folder, dirs_exist_ok=True)
        return super().load_checkpoint(model_id, path, with_optimizer=with_optimizer)

    def save_checkpoint(
        self, model_id: str, kind: str, name: str | None, options: dict[str, Any]
    ) -> Payload:
        self.num_requests[model_id] += 1
        answer = super().save_checkpoint(model_id, kind, name, options)
        if kind == "sampler_weights":
            return {"path": f"tinker://{model_id}/{name}"}
        path = CheckpointPath(model_id, kind, name or "")
        if self.states_folder:
            shutil.copytree(self.store.find_folder(path), self.find_state(path))
        return answer

    def find_state(self, path: CheckpointPath) -> Path:
        assert self.states_folder is not None
        return self.states_folder / path.run / f"{path.name}.tar.gz"

    def load_sampler(self, base_model: str | None, model_path: str | None) -> Any:
        """Sampling loads what was saved over the weights in training."""
        loaded = super().load_sampler(base_model, model_path)
        if model_path is not None:
            run = CheckpointPath.parse(model_path).run
            Engine.load_checkpoint(self, run, model_path, with_optimizer=False)
        return loaded

    def pack_sampler_weights(self, run: str, name: str) -> Response:
        """Return an adapter as SkyRL hands it out."""
        folder = self.store.find_folder(CheckpointPath(run, "sampler_weights", name))
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            for file in ("adapter_model.safetensors", "adapter_config.json"):
                tar.add(folder / file, arcname=file)
        return Response(buffer.getvalue(), media_type="application/octet-stream")


def scale_losses(datum: DecodedDatum, divisor: int) -> DecodedDatum:
    """Return the datum with weights that divide its loss."""
    name = "weights" if "weights" in datum.inputs else "advantages"
    scaled = datum.inputs[name] * np.float32(1 / divisor)
    return DecodedDatum(datum.tokens, {**datum.inputs, name: scaled})


def compute_losses(
    loss_fn: str, config: dict[str, Any], datum: DecodedDatum, logprobs: np.ndarray
) -> np.ndarray:
    """Return the loss of each token."""
    if loss_fn == "cross_entropy":
        return -datum.inputs["weights"] * logprobs
    advantages = datum.inputs["advantages"]
    ratio = np.exp(logprobs - datum.inputs["logprobs"])
    if loss_fn == "importance_sampling":
        return -ratio * advantages
    clipped = ratio.clip(
        config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
    )
    if loss_fn == "cispo":
        return -clipped * logprobs * advantages
    return -np.minimum(ratio * advantages, clipped * advantages)


class DeviatingDispatcher(RequestDispatcher):
    """A dispatcher of the requests for samples to such an engine."""

    def submit_sample(self, body: SampleBody) -> dict[str, Any]:
        assert isinstance(self.engine, DeviatingEngine)
        params, deviates = body.sampling_params, self.engine.deviates
        if deviates("old_clients_overwrite"):
            self.engine.load_into_training(body.sampling_session_id)
        if deviates("no_stop_tokens"):  # Those of the model end an answer.
            params.stop = None
        if deviates("answers_without_end") and params.stop is None:
            params.stop = []
        if deviates("no_seeds"):
            params.seed = None
        answer = super().submit_sample(body)
        if deviates("no_sequence_ids"):
            answer.pop("sample_sequence_ids", None)
        return answer


def parse_options() -> argparse.Namespace:
    """Read our own options, or those of SkyRL's server."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", "--base-model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--store", type=Path, default=Path("/dev/null"))
    parser.add_argument("--older", action="store_true")
    parser.add_argument("--checkpoints-base", type=Path)
    parser.add_argument("--with-daemon", action="store_true")
    args, _ = parser.parse_known_args()
    if args.checkpoints_base:
        args.store = args.checkpoints_base.parent / "own"
    return args


def main() -> None:
    """Serve the engine until the process is ended."""
    args = parse_options()
    if args.with_daemon:
        # As Ray's daemons: they are no children of the server when it is gone.
        subprocess.Popen(["sleep", "8888"], start_new_session=True)
    routes.RequestDispatcher = DeviatingDispatcher  # type: ignore[misc]
    if args.older:
        routes.check_sdk_version = lambda version: None
    with program.bind_listener("127.0.0.1", args.port) as listener:
        engine = (OlderEngine if args.older else DeviatingEngine)(args.model, args.store)
        create = routes.create_app

        def encode_sample(response: SampleResponse) -> bytes:
            logprobs = response.prompt_logprobs
            if engine.deviates("short_logprobs") and logprobs.logprobs is not None:
                logprobs.logprobs = logprobs.logprobs[1:]
            return encode_sample_response(response)

        def create_app(served: Engine, token: str) -> FastAPI:
            app = create(served, token)
            if isinstance(engine, OlderEngine):
                engine.states_folder = args.checkpoints_base
                path = "/api/v1/training_runs/{run}/checkpoints/{name}/archive"
                app.get(path)(engine.pack_sampler_weights)
            return app

        model_thread.encode_sample_response = encode_sample
        routes.create_app = create_app
        token = os.environ.get("LACHESIS_ENGINE_TOKEN", "")
        program.serve_engine(engine, token, listener, host="127.0.0.1")


if __name__ == "__main__":
    main()
