"""Run supervised fine-tuning on a file of examples before the first step of a run."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from lachesis.base.files import write_private
from lachesis.config.run_config import RunConfig
from lachesis.trainer.checkpoint_saving import CheckpointManager
from lachesis.trainer.sft_examples import SftExample, iterate_batches, read_examples
from lachesis.trainer.trained_model import Policy
from lachesis.trainer.trainer_state import TrainerState

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


async def run_sft_stage(
    config: RunConfig,
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    state: TrainerState,
    checkpoint_manager: CheckpointManager,
    stop: asyncio.Event,
) -> None:
    """Run the stage if a file is configured, and save a checkpoint of step 0.

    The log gets a line per update, and `sft.json` in the run's folder the first and the last
    loss.
    """
    if config.tinker.sft_file is None:
        return
    state.phase = "supervised fine-tuning"
    examples = read_examples(
        Path(config.tinker.sft_file), tokenizer, max_tokens=config.tinker.max_token_trainer_length
    )
    losses = await _fine_tune(config, policy, state, examples, stop)
    if losses is None:
        return
    await policy.publish()
    state.usage.version += 1
    summary = {
        "examples": len(examples),
        "updates": len(losses),
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }
    run_folder = checkpoint_manager.checkpoints.folder.parent
    write_private(run_folder / "sft.json", json.dumps(summary))
    state.set_waiting_for("checkpoint")
    # A run that ends before its first checkpoint need not repeat this stage.
    await checkpoint_manager.save(0)
    state.phase = "training"


async def _fine_tune(
    config: RunConfig,
    policy: Policy,
    state: TrainerState,
    examples: list[SftExample],
    stop: asyncio.Event,
) -> list[float] | None:
    """Return the loss of each update; None if a stop was requested."""
    sft_batches = list(
        iterate_batches(
            examples,
            batch_size=config.tinker.sft_batch_size,
            epochs=config.tinker.sft_epochs,
            seed=config.tinker.seed,
        )
    )
    losses: list[float] = []
    for update_number, batch in enumerate(sft_batches, 1):
        if stop.is_set():
            return None
        state.set_waiting_for("forward_backward")
        loss = await policy.fine_tune_on_examples(batch, config.tinker.sft_learning_rate)
        losses.append(loss)
        state.usage.trained += sum(len(example.tokens) for example in batch)
        log.info("supervised update %d/%d loss %.4f", update_number, len(sft_batches), loss)
    return losses
