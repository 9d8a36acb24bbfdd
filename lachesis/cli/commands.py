"""Find the function that runs a command, and load only what that command needs."""

from __future__ import annotations

import argparse
import importlib

# The module in this package and its function, by the name of the command.
HANDLERS = {
    "api": "serve:handle_api",
    "completion": "completion:handle_completion",
    "backend": "backend:handle_backend",
    "config": "config_files:handle_config",
    "ask": "ask:handle_ask",
    "chat": "ask:handle_chat",
    "compare": "compare:handle_compare",
    "demo": "demo:handle_demo",
    "doctor": "doctor:handle_doctor",
    "edit": "run_edits:handle_edit",
    "env": "environments:handle_env",
    "envs": "environments:handle_envs",
    "logs": "logs:handle_logs",
    "mcp": "serve:handle_mcp",
    "metrics": "metrics:handle_metrics",
    "model": "environments:handle_model",
    "models": "models:handle_models",
    "notifications": "notifications:handle_notifications",
    "open": "one_run:handle_open",
    "report": "one_run:handle_report",
    "results": "one_run:handle_results",
    "resume": "train:handle_resume",
    "rm": "run_edits:handle_rm",
    "rollouts": "rollouts:handle_rollouts",
    "runs": "run_list:handle_runs",
    "serve": "serve:handle_serve",
    "serve-model": "ask:handle_serve_model",
    "status": "one_run:handle_status",
    "stop": "one_run:handle_stop",
    "test": "testing:handle_test",
    "train": "train:handle_train",
    "ui": "serve:handle_ui",
    "watch": "watch:handle_watch",
    "weights": "weights:handle_weights",
}


def run_command(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    # Modules are imported by name, so that `lachesis status` does not load what `train` needs.
    module, function = HANDLERS[args.command].split(":")
    handler = getattr(importlib.import_module(f"lachesis.cli.{module}"), function)
    _resolve_runs(args)
    return handler(args) or 0


def _resolve_runs(args: argparse.Namespace) -> None:
    """Replace a beginning of a run's id, or `@last`, by the id."""
    names_run = any(getattr(args, name, None) for name in ("run", "runs", "start_from", "like"))
    if not names_run:
        return
    from lachesis.runs.names_and_tags import resolve_checkpoint_name, resolve_run_id
    from lachesis.runs.store import RunStore

    store = RunStore()
    if getattr(args, "run", None):
        args.run = resolve_run_id(store, args.run)
    if getattr(args, "runs", None):
        args.runs = list(dict.fromkeys(resolve_run_id(store, run) for run in args.runs))
    if getattr(args, "like", None):
        args.like = resolve_run_id(store, args.like)
    if getattr(args, "start_from", None) and args.command == "train":
        args.start_from = resolve_checkpoint_name(store, args.start_from)
