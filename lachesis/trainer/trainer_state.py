"""Hold the trainer's state for its health route and its inference server."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lachesis.base.json_text import Json
from lachesis.inference_server.token_usage import Usage
from lachesis.trainer.evaluation_schedule import EvaluationScheduler


@dataclass
class TrainerState:
    """Hold the values of the trainer's health report."""

    phase: str = "starting"
    step: int = 0
    waiting_for: str = "start"
    """What the trainer waits for: rollouts, forward_backward, optim_step, sampler (new weights),
    checkpoint, or evaluation (after the last step)."""
    waiting_since: float = field(default_factory=time.time)
    """When it began to wait for that, in seconds since the epoch."""
    get_spent: Callable[[], Json] = dict
    """Returns the tokens, and the US dollars if prices are known, of all attempts until now."""
    get_pause: Callable[[], Json | None] = lambda: None
    """Returns why the Tinker server makes the run wait, if it does; see `ServerWatch`."""
    usage: Usage = field(default_factory=Usage)
    evaluations: EvaluationScheduler = field(default_factory=EvaluationScheduler)
    """Held-out evaluations during training."""
    groups: int = 0
    """Number of groups received for training, over all attempts."""
    groups_by_environment: dict[str, int] = field(default_factory=dict)
    """Number of those groups from each environment, if there are several."""
    resume_point: Json | None = None
    """What training was resumed from; see `lachesis.trainer.checkpoint_saving.ResumePoint`."""
    wandb_url: str | None = None
    wandb_error: str | None = None

    def set_waiting_for(self, activity: str) -> None:
        """Record what the trainer waits for from now on."""
        self.waiting_for, self.waiting_since = activity, time.time()
