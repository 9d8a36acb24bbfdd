"""The fields of a run's configuration, by section, and which of them are locked and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from lachesis.config.prices import Prices

LossName = Literal["auto", "importance_sampling", "ppo", "cispo", "gspo", "dro"]


@dataclass(frozen=True)
class Locked:
    """Marks a field that users may not change, with the reason that they are shown.

    The owner of this machine, who uses the command line, may change a field that is locked
    `for_agents`.
    """

    reason: str
    for_agents: bool = False


INFRASTRUCTURE = Locked("infrastructure: set by the profile or for each run")
COST = Locked("bounds what a run can cost")
VETTED = Locked("a value that is known to train well")
READS_FILES = Locked(
    "names a file of this machine, which its owner may choose with --set and an agent may not",
    for_agents=True,
)


class Section(BaseModel):
    """Frozen; a wrong type, a wrong range or an unknown field cannot be built."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
    )


class EnvSection(Section):
    """Fields of every Atropos environment; an environment's own fields come beside them."""

    model_config = ConfigDict(extra="allow")

    group_size: int = Field(16, ge=2, le=1024)
    """Rollouts per prompt; advantages are centred inside this group."""
    batch_size: int = Field(128, ge=2)
    """Rollouts per training step; a multiple of group_size."""
    total_steps: Annotated[int, COST] = Field(2500, ge=1)
    """Training steps before the run completes."""
    tokenizer_name: Annotated[str, INFRASTRUCTURE] = Field("Qwen/Qwen3-8B", min_length=1)
    """Tokenizer of the environment: a Hugging Face name or a folder."""
    rollout_server_url: Annotated[str, INFRASTRUCTURE] = "http://localhost:8000"
    """Address of the Atropos API."""
    use_wandb: Annotated[bool, INFRASTRUCTURE] = True
    """Whether the environment process logs to W&B itself."""
    max_token_length: Annotated[int, COST] = Field(8192, ge=8)
    """Most tokens of one generation."""
    max_num_workers: Annotated[int, VETTED] = Field(2048, ge=-1)
    """Groups in flight at once; -1 leaves it to the environment."""
    worker_timeout: Annotated[float, VETTED] = Field(3600, gt=0)
    """Seconds before a group that does not end is given up."""
    steps_per_eval: Annotated[int, VETTED] = 25
    """Steps between evaluations on held-out items, beside training; 0 or less for none."""
    max_batches_offpolicy: Annotated[int, VETTED] = Field(3, ge=1)
    """Batches that may wait for the trainer; 1 is the freshest."""
    inference_weight: Annotated[float, VETTED] = Field(1.0, gt=0)
    """Share of this environment where several feed one trainer."""
    mixture: dict[str, dict[str, Any]] = {}
    """Further environments that feed the same run, by name, each with its `weight` beside the 1 of
    this one, `max_token_length`, and fields of its own: {reverse_text: {weight: 0.5}}. The rest of
    this section holds for all.
    """
    eval_limit_ratio: Annotated[float, VETTED] = Field(0.1, gt=0, le=1)
    """Not used: no worker waits for an evaluation, which is made beside training."""
    ensure_scores_are_not_same: bool = False
    """Drop groups whose scores are all equal. Off: they count in reward/mean and carry no gradient,
    and a solved task cannot starve the trainer.
    """
    min_batch_allocation: Annotated[None, INFRASTRUCTURE] = None
    """Not used: an environment that has gone would hold its share for ever."""
    data_dir_to_save_evals: Annotated[str | None, INFRASTRUCTURE] = None
    """Where the environment writes evaluation results."""
    wandb_name: str | None = None
    """Name of the environment at the Atropos API; by default {env}-{YYYYmmdd-HHMMSS}."""

    @field_validator("max_num_workers")
    @classmethod
    def _check_workers(cls, workers: int) -> int:
        if workers == 0:
            raise ValueError("that would start no worker; allowed: -1, or 1 or more")
        return workers


class OpenAISection(Section):
    """The endpoint that environments sample from: the trainer's inference server."""

    model_name: Annotated[str, INFRASTRUCTURE] = Field("Qwen/Qwen3-8B", min_length=1)
    """The base model: a Hugging Face name or a folder."""
    base_url: Annotated[str, INFRASTRUCTURE] = Field(
        "http://localhost:8001/v1", pattern=r"^https?://[^/]+(/.+)?/v1$"
    )
    """Address, ending in /v1 without a slash behind it."""
    api_key: Annotated[str | None, INFRASTRUCTURE] = Field("x", min_length=1)
    """Sent as the bearer token; null leaves it to OPENAI_API_KEY. Never a secret."""
    weight: Annotated[float, INFRASTRUCTURE] = Field(1.0, gt=0)
    """Share of the requests, where there are several endpoints."""
    num_requests_for_eval: Annotated[int, INFRASTRUCTURE] = Field(256, ge=1)
    """Requests at once during an evaluation."""
    timeout: Annotated[int, INFRASTRUCTURE] = Field(3600, ge=1)
    """Seconds before a request is given up."""
    server_type: Annotated[Literal["vllm", "sglang"], INFRASTRUCTURE] = "vllm"
    """Dialect of the token-exact endpoint; vllm fails loudly where sglang returns an empty
    completion.
    """


class TinkerSection(Section):
    """The trainer."""

    lora_rank: Annotated[int, VETTED] = Field(32, ge=1, le=512)
    """Rank of the LoRA adapter."""
    learning_rate: Annotated[float, VETTED] = Field(4e-5, gt=0, lt=1)
    """Adam's learning rate."""
    max_token_trainer_length: Annotated[int, COST] = Field(9000, ge=16)
    """A group with a sequence of this many tokens or more is dropped by the environment."""
    checkpoint_dir: Annotated[str, INFRASTRUCTURE] = "./temp/"
    """Where checkpoint manifests lie."""
    save_checkpoint_interval: Annotated[int, VETTED] = Field(25, ge=1)
    """Steps between checkpoints."""
    keep_checkpoints: int = Field(3, ge=1, le=10_000)
    """Newest checkpoints that are kept; the one with the highest reward and the final one stay
    beside them.
    """
    loss_fn: LossName = "auto"
    """Policy-gradient loss; auto is ppo where batches may wait (max_batches_offpolicy above 1),
    else importance_sampling.
    """
    clip_low_threshold: float | None = Field(None, ge=0, lt=1)
    """Least ratio of ppo, cispo and gspo; by default 0.8 (cispo 0)."""
    clip_high_threshold: float | None = Field(None, gt=1)
    """Largest ratio of ppo, cispo and gspo; by default 1.2 (cispo 4)."""
    advantage: Literal["mean", "mean_std", "leave_one_out"] = "mean"
    """What a rollout's score is compared with inside its group."""
    weight_by: Literal["token", "sequence"] = "token"
    """Whether each token of a batch counts the same, or each rollout whatever its length."""
    cut_rollouts: Literal["train", "leave_out"] = "train"
    """What becomes of rollouts that the length limit has cut."""
    kl_coefficient: float = Field(0.0, ge=0, le=10)
    """Penalty on log-probabilities that move away from the base model's, in units of the score;
    costs one prompt pass per rollout.
    """
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes on after its warm-up: it stays, or falls towards zero at the last
    step.
    """
    learning_rate_warmup: int = Field(0, ge=0)
    """Steps over which the learning rate rises."""
    grad_clip_norm: float = Field(0.0, ge=0)
    """Largest norm of the gradient; 0 is no limit."""
    supervised_file: Annotated[str | None, READS_FILES] = None
    """A JSONL file to train on before the first step: prompt and completion, or messages, per line.
    """
    supervised_epochs: int = Field(1, ge=1, le=1000)
    """Times that file is gone through."""
    supervised_batch_size: int = Field(32, ge=1)
    """Its examples per update."""
    supervised_learning_rate: float = Field(1e-4, gt=0, lt=1)
    """Adam's learning rate for it."""
    seed: int = Field(0, ge=0)
    """Seed of the adapter's initialisation and, on the embedded engine, of sampling."""
    wandb_project: str = Field("atropos-tinker", min_length=1)
    """W&B project of the run."""
    wandb_group: str | None = None
    """W&B group of the run."""
    prices: Annotated[Prices | None, INFRASTRUCTURE] = None
    """What the base model's tokens cost at the start of the run; null when nothing is paid or no
    price is known.
    """
    use_wandb: bool = True
    """Whether the trainer logs to W&B: online with a key, else into the run's folder."""
    final_evaluation: bool = False
    """Evaluate the base and the trained model on held-out items when training ends."""


class LimitsSection(Section):
    """What a run may take, and what happens when it stalls. Checked while it runs; null is no
    limit.
    """

    max_hours: float | None = Field(None, gt=0)
    """Most hours from the start of the first process, over all attempts; then it saves a checkpoint
    and stops.
    """
    max_tokens: int | None = Field(None, ge=1)
    """Most tokens, prefill, sampled and trained together; then it saves a checkpoint and stops."""
    max_cost_usd: float | None = Field(None, gt=0)
    """Most US dollars by the price table; then it saves a checkpoint and stops."""
    on_stall: Literal["warn", "stop", "resume"] = "warn"
    """When a part of the run stands still: say so; save a checkpoint and stop; or go on from the
    newest checkpoint.
    """
    on_crash: Literal["stop", "resume"] = "stop"
    """When the run fails while it trains: leave it so; or go on from the newest whole checkpoint,
    at most three times.
    """
    stall_after_s: float = Field(60.0, ge=5)
    """Seconds without a sign of life of the part that is waited for, before it counts as a stall.
    """
    on_broken: Literal["advise", "stop"] = "advise"
    """When learning is judged broken: say so, or save a checkpoint and stop."""
