"""Say which fields of a run's configuration are locked: for whom, why, and on which profiles not.

The owner of this installation, who uses the command line, launch files and Prefect's pages, may
change a field that is locked for agents only.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Lock:
    """Hold why a field may not be changed, in words that are shown to whoever tries."""

    reason: str
    for_agents: bool = False
    """Whether the owner may change it all the same."""


INFRASTRUCTURE = Lock("infrastructure: set by the profile or for each run")
COST = Lock("limits what a run can cost", for_agents=True)
VETTED = Lock("a value that is known to train well", for_agents=True)
READS_FILES = Lock(
    "names a file of this machine, which the owner may choose with --set and an agent may not",
    for_agents=True,
)
# Profiles whose users may set what limits cost: here they pay nobody by the token.
TUNED = frozenset({"embedded", "custom"})
NOWHERE: frozenset[str] = frozenset()
# The lock of each locked field, and the profiles that leave the field open.
LOCKS: dict[str, tuple[Lock, frozenset[str]]] = {
    "env.total_steps": (COST, TUNED),
    "env.max_token_length": (COST, TUNED),
    "env.steps_per_eval": (VETTED, TUNED),
    "env.max_batches_offpolicy": (VETTED, TUNED),
    "env.worker_timeout": (VETTED, TUNED),
    "env.max_num_workers": (VETTED, NOWHERE),
    "env.inference_weight": (VETTED, NOWHERE),
    "env.eval_limit_ratio": (VETTED, NOWHERE),
    "env.tokenizer_name": (INFRASTRUCTURE, NOWHERE),
    "env.rollout_server_url": (INFRASTRUCTURE, NOWHERE),
    "env.use_wandb": (INFRASTRUCTURE, NOWHERE),
    "env.min_batch_allocation": (INFRASTRUCTURE, NOWHERE),
    "env.data_dir_to_save_evals": (INFRASTRUCTURE, NOWHERE),
    "openai.model_name": (INFRASTRUCTURE, NOWHERE),
    "openai.base_url": (INFRASTRUCTURE, NOWHERE),
    "openai.api_key": (INFRASTRUCTURE, NOWHERE),
    "openai.weight": (INFRASTRUCTURE, NOWHERE),
    "openai.num_requests_for_eval": (INFRASTRUCTURE, NOWHERE),
    "openai.timeout": (INFRASTRUCTURE, NOWHERE),
    "openai.server_type": (INFRASTRUCTURE, NOWHERE),
    "tinker.lora_rank": (VETTED, TUNED),
    "tinker.learning_rate": (VETTED, TUNED),
    "tinker.save_checkpoint_interval": (VETTED, TUNED),
    "tinker.max_token_trainer_length": (COST, TUNED),
    "tinker.backend": (COST, NOWHERE),
    "tinker.backend_config": (COST, NOWHERE),
    "tinker.sft_file": (READS_FILES, NOWHERE),
    "tinker.checkpoint_dir": (INFRASTRUCTURE, NOWHERE),
    "slurm": (INFRASTRUCTURE, NOWHERE),
    "testing": (INFRASTRUCTURE, NOWHERE),
}


def find_lock(field: str, profile: str) -> Lock | None:
    """Return the lock of a field on a profile; None where everybody may set the field.

    Args:
        field: SECTION.FIELD.
        profile: The name of the profile.
    """
    lock, open_on = LOCKS.get(field, (None, NOWHERE))
    return None if profile in open_on else lock


def is_infrastructure(field: str) -> bool:
    """Return whether a field is set by the profile or for each run, and says nothing about it."""
    return LOCKS.get(field, (None, NOWHERE))[0] is INFRASTRUCTURE
