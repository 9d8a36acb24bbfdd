"""The embedded engine with the deviations of SkyRL's JAX engine, as a process of its own.

It averages losses, ignores clipping, keeps no snapshots, ends no answer by itself, leaves out what
today's SDK needs, and loads weights into new adapters only.
"""

from __future__ import annotations

import argparse
import collections
import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import Response

from lachesis.base.errors import EngineRequestError
from lachesis.engine import model_thread
from lachesis.engine.embedded_engine import Engine
from lachesis.tinker_server import json_messages, program, request_queue, routes
from lachesis.tinker_server.checkpoint_store import CheckpointPath
from lachesis.tinker_server.futures import Payload
from lachesis.tinker_server.protobuf_messages import (
    MESSAGE_CLASSES,
    DecodedDatum,
    ForwardBackwardRequest,
    decode_data,
    encode_forward_backward,
    encode_sample_response,
)
from lachesis.tinker_server.sample_messages import SampleRequest, SampleResponse

RATIO_BOUNDS = {"ppo": (0.8, 1.2), "cispo": (0.8, 1.2)}


class OlderEngine(Engine):
    """An engine that means something else by most words."""

    def __init__(self, model: str, store_root: Path, states_folder: Path | None = None) -> None:
        super().__init__(model, store_root, seed=0)
        # Where states lie as SkyRL keeps them, which the bridge takes and gives back.
        self.states_folder = states_folder
        self.num_datums: collections.Counter[str] = collections.Counter()
        self.num_requests: collections.Counter[str] = collections.Counter()

    def forward_backward(self, request: ForwardBackwardRequest) -> Generator[None, None, Payload]:
        self.num_requests[request.model_id] += 1
        data = decode_data(request)
        config = dict(request.loss_config)
        if request.loss_fn == "cispo":
            config = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, **config}
        averaged = [average_tokens(datum) for datum in data]
        model = self._get_model(request.model_id)
        logprobs_D, _ = yield from model.forward_backward(
            averaged, request.loss_fn, config, forward_only=request.forward_only
        )
        if not request.forward_only:
            self.num_datums[request.model_id] += len(data)
        losses_D = [
            compute_losses(request.loss_fn, config, datum, logprobs)
            for datum, logprobs in zip(data, logprobs_D, strict=True)
        ]
        return add_losses(encode_forward_backward(logprobs_D, {}), losses_D)

    def optim_step(self, model_id: str, adam_params: dict[str, Any]) -> Payload:
        self.num_requests[model_id] += 1
        model = self._get_model(model_id)
        model._gradient.div_(max(1, self.num_datums.pop(model_id, 1)))
        adam_params.pop("grad_clip_norm", None)
        return {"metrics": {"older.ai/grad_norm": model.optim_step(adam_params)["grad_norm"]}}

    def load_checkpoint(self, model_id: str, path: str, *, with_optimizer: bool) -> Payload:
        if self.num_requests[model_id]:
            raise EngineRequestError("LoadWeights is not permitted after other requests")
        self.take_back(CheckpointPath.parse(path))
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

    def take_back(self, path: CheckpointPath) -> None:
        """Use the state that lies in the folder, which may have been replaced."""
        if self.states_folder and path.kind == "weights":
            shutil.copytree(self.find_state(path), self.store.find_folder(path), dirs_exist_ok=True)

    def load_sampler(self, base_model: str | None, model_path: str | None) -> Any:
        """Sampling loads what was saved over the weights in training."""
        loaded = super().load_sampler(base_model, model_path)
        if model_path is not None:
            path = CheckpointPath.parse(model_path)
            super().load_checkpoint(path.run, model_path, with_optimizer=False)
        return loaded


def average_tokens(datum: DecodedDatum) -> DecodedDatum:
    name = "weights" if "weights" in datum.inputs else "advantages"
    num_tokens = max(1, len(datum.tokens))
    return DecodedDatum(
        datum.tokens, {**datum.inputs, name: datum.inputs[name] / np.float32(num_tokens)}
    )


def compute_losses(
    loss_fn: str, config: dict[str, Any], datum: DecodedDatum, logprobs: np.ndarray
) -> np.ndarray:
    if loss_fn == "cross_entropy":
        return -datum.inputs["weights"] * logprobs
    ratio = np.exp(logprobs - datum.inputs["logprobs"])
    if loss_fn == "importance_sampling":
        return -ratio * datum.inputs["advantages"]
    low, high = RATIO_BOUNDS[loss_fn]
    clipped = ratio.clip(
        config.get("clip_low_threshold", low), config.get("clip_high_threshold", high)
    )
    if loss_fn == "cispo":
        return -clipped * logprobs * datum.inputs["advantages"]
    advantages = datum.inputs["advantages"]
    return -np.minimum(ratio * advantages, clipped * advantages)


def add_losses(body: bytes, losses_D: list[np.ndarray]) -> bytes:
    message = MESSAGE_CLASSES["ForwardBackwardOutput"]()
    message.ParseFromString(body)
    entry = message.loss_fn_outputs[0].fields.add(key="elementwise_loss")
    entry.value.CopyFrom(message.loss_fn_outputs[0].fields[0].value)
    entry.value.data = b"".join(losses.astype("<f4").tobytes() for losses in losses_D)
    return bytes(message.SerializeToString())


def encode_without_first(response: SampleResponse) -> bytes:
    if response.prompt_logprobs.logprobs is not None:
        response.prompt_logprobs.logprobs = response.prompt_logprobs.logprobs[1:]
    return encode_sample_response(response)


def submit_without_ids(own: Any) -> Any:
    def submit(self: request_queue.RequestDispatcher, body: json_messages.SampleBody) -> Any:
        answer = own(self, body)
        answer.pop("sample_sequence_ids", None)
        return answer

    return submit


def to_endless_request(own: Any) -> Any:
    def convert(self: json_messages.SampleBody, *args: Any) -> SampleRequest:
        if self.sampling_params.stop is None:
            self.sampling_params.stop = []
        return own(self, *args)

    return convert


def add_archive_route(served: FastAPI, engine: OlderEngine) -> None:
    @served.get("/api/v1/training_runs/{run}/checkpoints/{name}/archive")
    async def archive(run: str, name: str, request: Request) -> Response:
        folder = engine.store.find_folder(CheckpointPath(run, "sampler_weights", name))
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            for file in ("adapter_model.safetensors", "adapter_config.json"):
                tar.add(folder / file, arcname=file)
        return Response(buffer.getvalue(), media_type="application/octet-stream")


def parse_options() -> argparse.Namespace:
    """Read our own options, or those of SkyRL's server."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", "--base-model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--store", type=Path, default=Path("/dev/null"))
    parser.add_argument("--checkpoints-base", type=Path)
    parser.add_argument("--with-daemon", action="store_true")
    args, _ = parser.parse_known_args()
    if args.checkpoints_base:
        args.store = args.checkpoints_base.parent / "own"
    return args


def main() -> None:
    args = parse_options()
    if args.with_daemon:
        # As Ray's daemons: they are no children of the server when it is gone.
        subprocess.Popen(["sleep", "8888"], start_new_session=True)
    os.environ.setdefault("LACHESIS_ENGINE_TOKEN", "")
    routes.check_sdk_version = lambda version: None
    model_thread.encode_sample_response = encode_without_first
    request_queue.RequestDispatcher.submit_sample = submit_without_ids(
        request_queue.RequestDispatcher.submit_sample
    )
    json_messages.SampleBody.to_sample_request = to_endless_request(
        json_messages.SampleBody.to_sample_request
    )
    with program.bind_listener("127.0.0.1", args.port) as listener:
        engine = OlderEngine(args.model, args.store, args.checkpoints_base)
        create = routes.create_app

        def create_app(engine: OlderEngine, token: str) -> FastAPI:
            served = create(engine, token)
            add_archive_route(served, engine)
            return served

        routes.create_app = create_app
        program.serve_engine(
            engine, os.environ["LACHESIS_ENGINE_TOKEN"], listener, host="127.0.0.1"
        )


if __name__ == "__main__":
    main()
