"""Serve models over the Tinker protocol on loopback: `python -m lachesis.engine --model
NAME_OR_PATH --port N`.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lachesis.base import paths
from lachesis.base.argparse_types import LORA_RANK, NUM_TOKENS, PORT, SEED
from lachesis.base.errors import make_embedded_error
from lachesis.models.transformers_import import leave_out_bitsandbytes, pause_garbage_collection
from lachesis.tinker_server.program import bind_listener, read_token, run_program, serve_engine

if TYPE_CHECKING:
    from lachesis.engine.embedded_engine import Engine


def main() -> int:
    """Serve until SIGTERM, and return the exit code."""
    args = _parse_args()
    if args.base_weights == "full":
        leave_out_bitsandbytes()
    # Without this the log is full of the Hub client's retries.
    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)
    return run_program(lambda: serve(args))


def _parse_args() -> argparse.Namespace:
    """Return the options of the program."""
    parser = argparse.ArgumentParser(prog="python -m lachesis.engine", description=__doc__)
    parser.add_argument(
        "--model",
        action="append",
        required=True,
        help="a Hugging Face causal language model: name, or local folder; repeat it for further "
        "ones, such as a teacher: all are kept in memory",
    )
    parser.add_argument("--port", type=PORT, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a further host name by which clients may call this server",
    )
    parser.add_argument(
        "--store", type=Path, help="folder of the checkpoints (default: $LACHESIS_HOME/engine)"
    )
    parser.add_argument(
        "--seed", type=SEED, help="seed of sampling requests that bring none (default: random)"
    )
    parser.add_argument(
        "--precision",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="type of the base model's weights; adapters are float32 (default: bfloat16 on a GPU "
        "that has it, else float32)",
    )
    parser.add_argument(
        "--base-weights",
        choices=("full", "8bit", "4bit"),
        default="full",
        help="store the base model's linear layers in fewer bits, which needs bitsandbytes",
    )
    parser.add_argument(
        "--rank",
        type=LORA_RANK,
        default=32,
        help="rank of the adapters that memory is planned for (default: 32)",
    )
    parser.add_argument(
        "--sequence-tokens",
        type=NUM_TOKENS,
        default=4096,
        help="length of the longest sequence that memory is planned for (default: 4096)",
    )
    parser.add_argument(
        "--memory-gib",
        type=float,
        help="memory of the device to use at most (default: all that is free)",
    )
    return parser.parse_args()


def serve(args: argparse.Namespace) -> None:
    """Bind the port, load the models, and serve until SIGTERM."""
    # PyTorch reads this when it is imported. Threads that wait actively take the cores from the
    # other processes of a run, and sampling then takes three to thirty times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    token = read_token()
    # Bound before the model is loaded, so that a port in use fails in a second.
    with bind_listener(args.host, args.port) as listener:
        try:
            _serve_models(args, token, listener)
        except ImportError as error:
            raise make_embedded_error("the embedded engine", str(error.name)) from error


def _serve_models(args: argparse.Namespace, token: str, listener: socket.socket) -> None:
    with pause_garbage_collection():
        engine = _load_models(args)

    from lachesis.engine.base_model import torch_threads

    torch_threads.tune_num_threads(engine.default_model.base)
    serve_engine(engine, token, listener, host=args.host, allowed_hosts=args.allow_host)


def _load_models(args: argparse.Namespace) -> Engine:
    """Load the base models and return the engine that serves them."""
    from lachesis.engine.base_model.load import LoadSettings
    from lachesis.engine.embedded_engine import Engine

    settings = LoadSettings(
        precision=args.precision,
        base_weights=args.base_weights,
        rank=args.rank,
        sequence_tokens=args.sequence_tokens,
        memory_limit_bytes=int(args.memory_gib * 2**30) if args.memory_gib else None,
    )
    model, *extra_models = args.model
    store = args.store or paths.home() / "engine"
    return Engine(model, store, extra_models=extra_models, seed=args.seed, settings=settings)


if __name__ == "__main__":
    sys.exit(main())
