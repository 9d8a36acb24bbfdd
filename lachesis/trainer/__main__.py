"""Run the trainer: `python -m lachesis.trainer --config FILE`.

It trains through the Tinker API on batches from the Atropos API. The Tinker server and key come
from TINKER_BASE_URL and TINKER_API_KEY. Options override the file. SIGTERM saves a checkpoint and
ends the process. An error ends it with exit code 1 and the reason as the last line.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lachesis.base.errors import LachesisError
from lachesis.config import run_config
from lachesis.config.run_config import RunConfig
from lachesis.inference_server.serving import (
    bind_inference_socket,
    guard_app,
    load_tokenizer,
    serve_in_background,
    serve_without_training,
)
from lachesis.runs.folder import RunDir

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lachesis.checkpoints.manifests import Checkpoints, Manifest
    from lachesis.trainer.loop import Trainer
    from lachesis.trainer.trained_model import Policy
from lachesis.trainer.trackers import create_trackers

log = logging.getLogger("lachesis.trainer")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(prog="python -m lachesis.trainer", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the run's YAML")
    parser.add_argument(
        "--run-folder",
        type=Path,
        help="folder of the run's other files (default: that of its YAML)",
    )
    parser.add_argument("--base-model")
    parser.add_argument("--lora-rank", type=int)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--num-steps", type=int)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--group-size", type=int)
    parser.add_argument("--wandb-project")
    parser.add_argument("--wandb-group")
    parser.add_argument("--no-wandb", action="store_true")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue from the newest complete checkpoint, if there is one",
    )
    parser.add_argument(
        "--evaluate-base",
        action="store_true",
        help="evaluate the base model too, because training does not begin with it",
    )
    parser.add_argument(
        "--base-only",
        action="store_true",
        help="serve the base model until SIGTERM; nothing is trained",
    )
    parser.add_argument(
        "--weights",
        metavar="PATH",
        help="with --base-only: serve these sampler weights, and the base model under /base",
    )
    return parser.parse_args(argv)


def read_config(args: argparse.Namespace) -> RunConfig:
    """Return the configuration in the file with the command line's values applied.

    Raises:
        ConfigError: A value cannot work.
    """
    values = RunConfig.from_yaml(args.config).model_dump()
    if values["tinker"]["use_wandb"] is None:  # Only a run decides it by what it finds.
        values["tinker"]["use_wandb"] = True
    overrides: dict[tuple[str, str], Any] = {
        ("env", "tokenizer_name"): args.base_model,
        ("openai", "model_name"): args.base_model,
        ("tinker", "lora_rank"): args.lora_rank,
        ("tinker", "learning_rate"): args.learning_rate,
        ("env", "total_steps"): args.num_steps,
        ("env", "batch_size"): args.batch_size,
        ("env", "group_size"): args.group_size,
        ("tinker", "wandb_project"): args.wandb_project,
        ("tinker", "wandb_group"): args.wandb_group,
        ("tinker", "use_wandb"): False if args.no_wandb else None,
    }
    for (section, name), value in overrides.items():
        if value is not None:
            values[section][name] = value
    return run_config.build_run_config(values, source=str(args.config))


def main() -> int:
    """Train until the last step or SIGTERM, and return the exit code."""
    args = parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    # Without this the log is full of the Hub client's retries.
    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)
    # The SDK and the tokenizer import PyTorch if it is installed. This process does not need it,
    # and without it starts four seconds of processor time sooner, with a third of the memory.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    # Otherwise transformers warns that PyTorch was not found.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        asyncio.run(run(read_config(args), args))
    except LachesisError as error:
        print(join_lines(f"{error.code}: {error}"), file=sys.stderr, flush=True)
        return 1
    except Exception as error:
        log.exception("the trainer failed")
        print(join_lines(f"{type(error).__name__}: {error}"), file=sys.stderr, flush=True)
        return 1
    return 0


def join_lines(text: str) -> str:
    """Join lines to a single line, because the reason for a failure must be the last line of the
    log."""
    return " ".join(text.split())


async def run(config: RunConfig, args: argparse.Namespace) -> None:
    """Connect the parts, serve inference, and train."""
    stop = asyncio.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signal_number, stop.set)
    run_folder = args.run_folder or args.config.resolve().parent
    with bind_inference_socket(config) as sock:
        tokenizer = load_tokenizer(config)
        if args.base_only:
            await serve_without_training(config, sock, tokenizer, stop, args.weights)
        else:
            await _train(config, args, run_folder, sock, tokenizer, stop)


async def _train(
    config: RunConfig,
    args: argparse.Namespace,
    run_folder: Path,
    sock: socket.socket,
    tokenizer: PreTrainedTokenizerBase,
    stop: asyncio.Event,
) -> None:
    """Connect the parts of the trainer, serve, and train until the last step or a stop."""
    from lachesis.base.stop_event import run_unless_stopped
    from lachesis.checkpoints.manifests import Checkpoints
    from lachesis.trainer.tinker_outages import ServerWatch
    from lachesis.trainer.trained_model import Policy

    checkpoints = Checkpoints(run_folder / "checkpoints")
    resume_checkpoint = checkpoints.find_resumable() if args.resume else None
    resume_path = None
    if resume_checkpoint:
        resume_path = resume_checkpoint.state
        log.info(
            "resuming from step %d: %s, with its optimizer", resume_checkpoint.step, resume_path
        )
    run_dir = RunDir(run_folder.parent, run_folder.name)
    watch = ServerWatch(run_dir.server_pause)
    policy = await run_unless_stopped(
        stop, watch.run_unless_failed(Policy.create(config, resume_from=resume_path, watch=watch))
    )
    if policy is None:
        return  # The process was asked to end before there was anything to save.
    status: Literal["success", "errored"] = "errored"
    try:
        if config.profile != "embedded":  # The embedded engine ends with the run.
            policy.write_session_file(run_dir.tinker_session)
        await watch.run_unless_failed(policy.publish())
        trainer = await watch.run_unless_failed(
            _create_trainer(
                config,
                policy,
                checkpoints,
                resume_checkpoint,
                run_dir,
                tokenizer,
                evaluate_base=args.evaluate_base,
            )
        )
        trainer.state.get_pause = watch.get_pause
        await watch.run_unless_failed(_serve_and_train(trainer, sock, stop))
        status = "success"
    finally:
        await policy.close(status)


async def _create_trainer(
    config: RunConfig,
    policy: Policy,
    checkpoints: Checkpoints,
    resume_checkpoint: Manifest | None,
    run_dir: RunDir,
    tokenizer: PreTrainedTokenizerBase,
    *,
    evaluate_base: bool,
) -> Trainer:
    """Return the trainer with its state, loaded from the checkpoint if there is a checkpoint."""
    from lachesis.trainer.checkpoint_saving import CheckpointManager
    from lachesis.trainer.evaluation_schedule import EvaluationScheduler
    from lachesis.trainer.loop import Trainer
    from lachesis.trainer.rollout_client import RolloutClient
    from lachesis.trainer.trainer_state import TrainerState

    state = TrainerState()
    policy.usage = state.usage
    checkpoint_manager = CheckpointManager(
        policy,
        checkpoints,
        num_to_keep=config.tinker.keep_checkpoints,
        resume_checkpoint=resume_checkpoint,
    )
    state.groups = checkpoint_manager.groups
    state.groups_by_environment = dict(checkpoint_manager.groups_by_environment)
    state.evaluations = EvaluationScheduler(
        list(config.build_environment_configs()),
        every_steps=config.env.steps_per_eval,
        last_step=config.env.total_steps if config.tinker.final_evaluation else None,
        base_sampler=policy.base_sampler if evaluate_base else None,
        usage=state.usage,
        failures_file=run_dir.failed_evaluations,
    )
    checkpoint_manager.get_evaluated_step = lambda: state.evaluations.step_awaited
    if resume_checkpoint:
        state.step = resume_checkpoint.step
        resume_point = await checkpoint_manager.verify_resume(resume_checkpoint)
        state.resume_point = resume_point.model_dump()
    return Trainer(
        config,
        policy,
        RolloutClient(config.env.rollout_server_url),
        checkpoint_manager=checkpoint_manager,
        state=state,
        run_dir=run_dir,
        trackers=create_trackers(config, run_dir.path),
        tokenizer=tokenizer,
    )


async def _serve_and_train(trainer: Trainer, sock: socket.socket, stop: asyncio.Event) -> None:
    """Serve inference and train until the last step, or until `stop` is set."""
    from lachesis.inference_server.app import create_app
    from lachesis.trainer.evaluation_routes import add_evaluation_routes

    config, state = trainer.config, trainer.state
    try:
        await trainer.rollout_client.register(
            config,
            first_step=state.step,
            checkpoint_dir=trainer.checkpoint_manager.checkpoints.folder,
        )
        app = create_app(trainer.policy, trainer.tokenizer, config, state)
        add_evaluation_routes(app, trainer.policy, trainer.tokenizer, config, state)
        async with serve_in_background(guard_app(app, config), sock):
            await trainer.run(stop)
    finally:
        await asyncio.to_thread(trainer.trackers.close)
        await trainer.rollout_client.close()


if __name__ == "__main__":
    sys.exit(main())
