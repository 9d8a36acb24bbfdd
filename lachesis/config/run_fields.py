"""Define the fields of a run's configuration; `locked_fields` says which are locked and why."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from lachesis.base.argparse_types import MAX_SEED
from lachesis.models.chat_template import Thinking

TrackerName = Literal["wandb", "tensorboard", "trackio"]
LossName = Literal["auto", "importance_sampling", "ppo", "cispo", "gspo", "dro"]


# Bounds that no run reaches, so that a slip of the finger is refused where it is typed.
MAX_STEPS = 10_000_000
MAX_CONTEXT = 10_000_000  # Tokens.
MAX_SECONDS = 30 * 86_400


class Section(BaseModel):
    """Refuse values of the wrong type or range and unknown fields; a section cannot be changed."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
    )


class EnvSection(Section):
    """Fields of every Atropos environment; an environment's own fields are stored beside them."""

    model_config = ConfigDict(extra="allow")

    group_size: int = Field(16, ge=2, le=1024)
    """Rollouts per prompt; advantages are centred inside this group."""
    batch_size: int = Field(128, ge=2, le=65_536)
    """Rollouts per training step; a multiple of group_size."""
    total_steps: int = Field(2500, ge=1, le=MAX_STEPS)
    """Training steps before the run completes."""
    tokenizer_name: str = Field("Qwen/Qwen3-8B", min_length=1)
    """Tokenizer of the environment: a Hugging Face name or a folder."""
    rollout_server_url: str = "http://localhost:8000"
    """Address of the Atropos API."""
    use_wandb: bool = True
    """Whether the environment process logs to W&B itself."""
    max_token_length: int = Field(8192, ge=8, le=MAX_CONTEXT)
    """Maximum number of tokens of a rollout, prompt and answer together."""
    max_num_workers: int = Field(2048, ge=-1, le=100_000)
    """Maximum number of groups in flight; -1 leaves it to the environment."""
    worker_timeout: float = Field(3600, gt=0, le=MAX_SECONDS)
    """Seconds after which a group that has not ended is cancelled."""
    steps_per_eval: int = Field(25, ge=-MAX_STEPS, le=MAX_STEPS)
    """Steps between evaluations on held-out items during training; 0 or less for none."""
    max_batches_offpolicy: int = Field(3, ge=1, le=1000)
    """Maximum number of batches that wait for the trainer; 1 is the most on-policy."""
    inference_weight: float = Field(1.0, gt=0, le=1e6)
    """Weight of this environment where several feed one trainer."""
    mixture: dict[str, dict[str, Any]] = Field({})
    """Further environments of the run by name, each with its `weight` (this one has weight 1),
    `max_token_length` and fields of its own: {reverse_text: {weight: 0.5}}. All other fields of
    this section apply to every environment.
    """
    eval_limit_ratio: float = Field(0.1, gt=0, le=1)
    """Not used: evaluations run beside training."""
    ensure_scores_are_not_same: bool = False
    """Whether to drop groups whose scores are all equal. If not, they count in reward/mean and
    carry no gradient, and a solved task cannot starve the trainer.
    """
    min_batch_allocation: None = None
    """Not used: an ended environment would keep its share."""
    data_dir_to_save_evals: str | None = None
    """Where the environment writes evaluation results."""
    wandb_name: str | None = None
    """Name of the environment at the Atropos API; by default {env}-{YYYYmmdd-HHMMSS}."""

    @field_validator("max_num_workers")
    @classmethod
    def _check_workers(cls, workers: int) -> int:
        if workers == 0:
            raise ValueError("no worker would start; allowed: -1, or 1 or more")
        return workers


class OpenAISection(Section):
    """The endpoint that environments sample from: the trainer's inference server."""

    model_name: str = Field("Qwen/Qwen3-8B", min_length=1)
    """The base model: a Hugging Face name or a folder."""
    base_url: str = Field("http://localhost:8001/v1", pattern=r"^https?://[^/]+(/.+)?/v1$")
    """URL, ending in /v1 without a trailing slash."""
    api_key: str | None = Field("x", min_length=1)
    """Sent as the bearer token; null leaves it to OPENAI_API_KEY. Never a secret."""
    weight: float = Field(1.0, gt=0, le=1e6)
    """Share of the requests, where there are several endpoints."""
    num_requests_for_eval: int = Field(256, ge=1, le=100_000)
    """Maximum number of concurrent requests during an evaluation."""
    timeout: int = Field(3600, ge=1, le=MAX_SECONDS)
    """Seconds after which a request is cancelled."""
    server_type: Literal["vllm", "sglang"] = "vllm"
    """Dialect of the token-exact endpoint. Where a request fails, vllm reports an error and sglang
    returns an empty completion.
    """


class TinkerSection(Section):
    """Fields of the trainer."""

    lora_rank: int = Field(32, ge=1, le=512)
    """Rank of the LoRA adapter."""
    learning_rate: float = Field(4e-5, gt=0, lt=1)
    """Adam's learning rate."""
    max_token_trainer_length: int = Field(9000, ge=16, le=MAX_CONTEXT)
    """A group with a sequence of this many tokens or more is dropped by the environment."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the model's weights on the embedded engine; auto is bfloat16 on a card that has it,
    and float32 elsewhere.
    """
    backend: str = ""
    """Engine of others that profile custom trains on: skyrl, or the address of one that runs."""
    backend_config: dict[str, Any] = Field({})
    """Settings of a back end, in its own words."""
    base_weights: Literal["full", "8bit", "4bit"] = "full"
    """Whether the embedded engine stores the model's linear layers in fewer bits; that needs
    bitsandbytes.
    """
    checkpoint_dir: str = "./temp/"
    """Folder of the checkpoint manifests."""
    save_checkpoint_interval: int = Field(25, ge=1, le=MAX_STEPS)
    """Steps between checkpoints."""
    keep_checkpoints: int = Field(3, ge=1, le=10_000)
    """Number of newest checkpoints to keep; the one with the highest reward and the final one are
    kept too.
    """
    loss_fn: LossName = "auto"
    """Policy-gradient loss; auto means ppo if batches may wait (max_batches_offpolicy above 1),
    else importance_sampling.
    """
    clip_low_threshold: float | None = Field(None, ge=0, lt=1)
    """Minimum probability ratio of ppo, cispo and gspo; by default 0.8 (cispo 0)."""
    clip_high_threshold: float | None = Field(None, gt=1, le=1000)
    """Maximum probability ratio of ppo, cispo and gspo; by default 1.2 (cispo 4)."""
    advantage: Literal["mean", "mean_std", "leave_one_out"] = "mean"
    """Baseline that a rollout's score is compared with inside its group."""
    loss_aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """How losses are averaged: every token counts the same, or every rollout whatever its length.
    """
    truncated_rollouts: Literal["keep", "drop"] = "keep"
    """Whether to train on rollouts that the length limit has truncated."""
    kl_coefficient: float = Field(0.0, ge=0, le=10)
    """Weight of the KL penalty against the base model, in units of the score; costs one prompt
    pass per rollout.
    """
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up: constant, or falling to zero at the last step.
    """
    learning_rate_warmup: int = Field(0, ge=0, le=MAX_STEPS)
    """Steps over which the learning rate rises from zero."""
    grad_clip_norm: float = Field(0.0, ge=0, le=1e6)
    """Maximum norm of the gradient; 0 for no limit."""
    sft_file: str | None = None
    """JSONL file for supervised fine-tuning before the first step; each line has prompt and
    completion, or messages.
    """
    sft_epochs: int = Field(1, ge=1, le=1000)
    """Passes over that file."""
    sft_batch_size: int = Field(32, ge=1, le=65_536)
    """Examples per update on that file."""
    sft_learning_rate: float = Field(1e-4, gt=0, lt=1)
    """Adam's learning rate for that file."""
    seed: int = Field(0, ge=0, le=MAX_SEED)
    """Seed of the adapter's initialisation and, on the embedded engine, of sampling."""
    wandb_project: str = Field("atropos-tinker", min_length=1)
    """W&B project of the run."""
    wandb_group: str | None = None
    """W&B group of the run."""
    use_wandb: bool | None = None
    """Whether the trainer logs to W&B: online with a key, else offline into the run's folder; null:
    where `lachesis serve` has a key or WANDB_MODE."""
    trackers: list[TrackerName] = Field([])
    """Further places that metrics are logged to: tensorboard (files in the run's folder), trackio
    (a database on this machine), or wandb, which is the same as use_wandb.
    """
    thinking: Thinking = "default"
    """Whether the model thinks before it answers; default leaves it to its chat template."""
    chat_template_kwargs: dict[str, Any] = Field({})
    """Further arguments of the model's chat template, such as {reasoning_effort: low}."""
    stop_tokens: list[str] = Field([])
    """Tokens that end an answer beside the model's own, such as <|im_end|>."""
    final_evaluation: bool = False
    """Evaluate held-out items at step 0 and at the last step, whatever steps_per_eval is, and the
    base model once if training does not begin with it."""

    @property
    def tracker_names(self) -> list[TrackerName]:
        """Return the trackers of a run, W&B first if it is used."""
        wandb: list[TrackerName] = ["wandb"] if self.use_wandb else []
        return list(dict.fromkeys([*wandb, *self.trackers]))


class RolloutsSection(Section):
    """Say how many rollouts of a run are kept; see `lachesis.rollouts.parquet_files`."""

    max_gb: float = Field(1.0, ge=0, le=100_000)
    """Maximum gigabytes of rollouts that are kept; the oldest are deleted first, and 0 keeps none.
    """


class LimitsSection(Section):
    """Limits of a run, and what happens when it stalls or fails; they are checked while it runs.

    A limit of null is no limit.
    """

    max_hours: float | None = Field(None, gt=0, le=100_000)
    """Maximum hours of all attempts together; at this limit the run saves a checkpoint and stops.
    """
    max_tokens: int | None = Field(None, ge=1, le=10**12)
    """Maximum tokens, prefill, sampled and trained together; at this limit the run saves a
    checkpoint and stops.
    """
    max_cost_usd: float | None = Field(None, gt=0, le=1e9)
    """Maximum US dollars by the price table; at this limit the run saves a checkpoint and stops."""
    on_stall: Literal["warn", "stop", "resume"] = "warn"
    """What to do when a part of the run stalls: report it, save a checkpoint and stop, or resume
    from the newest checkpoint.
    """
    on_crash: Literal["stop", "resume"] = "stop"
    """What to do when the run fails during training: leave it stopped, or resume from the newest
    complete checkpoint, at most three times.
    """
    stall_after_s: float = Field(60.0, ge=5, le=MAX_SECONDS)
    """Seconds without activity after which a part of the run counts as stalled."""
    on_learning_failure: Literal["advise", "stop"] = "advise"
    """What to do when learning is judged broken: report it, or save a checkpoint and stop."""
