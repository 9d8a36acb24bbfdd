"""Serve an engine of others over today's Tinker protocol on loopback: `python -m
lachesis.skyrl_bridge --model NAME_OR_PATH --upstream URL --port N --store DIR`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lachesis.base.argparse_types import LORA_RANK, PORT
from lachesis.base.errors import ConfigError
from lachesis.tinker_server.program import bind_listener, read_token, run_program, serve_engine

if TYPE_CHECKING:
    from lachesis.skyrl_bridge.bridge import BridgeEngine

log = logging.getLogger(__name__)
KEY_VARIABLE = "LACHESIS_BACKEND_KEY"
# What the engine means, as it was measured at the start.
REPORT_FILE = "bridge.json"
# How long an engine may take to answer at all; loading the model comes after that.
START_TIMEOUT_S = 600.0


def main() -> int:
    """Serve until SIGTERM, and return the exit code."""
    args = _parse_args()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    return run_program(lambda: serve(args))


def _parse_args() -> argparse.Namespace:
    """Return the options of the program."""
    parser = argparse.ArgumentParser(prog="python -m lachesis.skyrl_bridge", description=__doc__)
    parser.add_argument("--model", required=True, help="the base model: name, or local folder")
    parser.add_argument("--upstream", required=True, metavar="URL", help="the engine's address")
    parser.add_argument(
        "--upstream-folder",
        type=Path,
        help="the folder in which the engine saves, if it is on this machine",
    )
    parser.add_argument("--port", type=PORT, required=True)
    parser.add_argument("--store", type=Path, required=True, help="folder of the checkpoints")
    parser.add_argument(
        "--rank", type=LORA_RANK, default=32, help="rank of the adapters that are expected"
    )
    return parser.parse_args()


def serve(args: argparse.Namespace) -> None:
    """Bind the port, wait for the engine, and serve until SIGTERM."""
    token = read_token()
    with bind_listener("127.0.0.1", args.port) as listener:
        engine = open_engine(args)
        serve_engine(engine, token, listener, host="127.0.0.1")
        engine.upstream.close()


def open_engine(args: argparse.Namespace) -> BridgeEngine:
    """Wait for the engine, measure its behaviour, and return the bridge to it.

    Raises:
        ServerDownError: The engine does not answer.
        ConfigError: It does not serve the model.
        ServerProtocolError: Its losses are neither sums nor means.
    """
    from lachesis.skyrl_bridge.adapter_transfer import AdapterStates
    from lachesis.skyrl_bridge.bridge import BridgeEngine
    from lachesis.skyrl_bridge.client import UpstreamClient
    from lachesis.skyrl_bridge.loss_sums import measure_semantics
    from lachesis.tinker_server.model_description import read_bridged_model

    model = read_bridged_model(args.model)
    key = os.environ.get(KEY_VARIABLE, "")
    upstream = UpstreamClient(args.upstream, key)
    upstream.wait_until_up(START_TIMEOUT_S)
    names = upstream.list_models()
    if model.name not in names:
        raise ConfigError(
            f"the engine at {args.upstream} serves {', '.join(names) or 'no model'}, not "
            f"{model.name}; choose one of these with --model"
        )
    upstream.open()
    semantics = measure_semantics(upstream, model.name, args.rank)
    log.info("the engine at %s: %s", args.upstream, semantics)
    args.store.mkdir(parents=True, exist_ok=True)
    report = {"upstream": args.upstream, "model": model.name, **semantics.as_dict()}
    (args.store / REPORT_FILE).write_text(json.dumps(report, indent=2))
    states = AdapterStates(upstream, model, args.store, args.upstream_folder)
    return BridgeEngine(model, upstream, key, states, semantics)


if __name__ == "__main__":
    sys.exit(main())
