"""Describe each metric of a run, with its unit.

`metrics.jsonl` of a run has these by name; a name with a part in capitals stands for many.
"""

import functools
import re
from collections.abc import Mapping
from types import MappingProxyType

METRIC_MEANINGS: Mapping[str, str] = MappingProxyType({
    "step": "number of the training step, from 1",
    "time": "when the line was written, in seconds since 1970",
    "reward/mean": "mean score of the rollouts of the batch",
    "reward/std": "standard deviation of these scores",
    "reward/parts/NAME": "mean of a part of the score that the environment names",
    "train/percent_correct": "share of the rollouts with a score above 0, from 0 to 1",
    "train/loss": "sum of the loss over the trained tokens, divided by their number",
    "train/learning_rate": "learning rate of the update",
    "advantages/mean": "mean advantage of the trained tokens",
    "advantages/std": "standard deviation of the advantages of the trained tokens",
    "batch/rollouts": "rollouts of the batch that have a score",
    "batch/groups": "groups of the batch",
    "batch/dropped_groups": "groups that could not be trained on; the trainer's log says why",
    "batch/zero_signal_groups": "groups whose scores are all equal, which carry no gradient",
    "batch/zero_signal_share": "share of the groups that carry no gradient, from 0 to 1",
    "batch/too_long": "rollouts longer than max_token_trainer_length, which are left out",
    "batch/invalid": "rollouts of the batch that the environment could not score",
    "batch/cut": "truncated rollouts that are left out; none unless truncated_rollouts is drop",
    "batch/without_logprobs": "rollouts whose log-probabilities of sampling had to be recomputed",
    "batch/datums": "sequences that were trained on",
    "batch/trained_tokens": "tokens of these that the loss counts",
    "distil/rollouts": "rollouts that were trained on a teacher's log-probabilities",
    "distil/advantage_mean": "mean advantage over the teacher, in nats per token",
    "entropy/sampling": "entropy of the sampled tokens under the weights that sampled them, in "
    "nats per token",
    "entropy/training": "the same under the weights in training, in nats per token",
    "kl/sampling_train": "KL divergence from the sampling weights to those in training, in nats "
    "per token (the estimate k3)",
    "kl/base": "KL divergence to the base model, where there is a penalty on it, in nats per token",
    "length/mean": "mean length of an answer, in tokens",
    "length/max": "length of the longest answer of the batch, in tokens",
    "logprobs/mean": "mean log-probability of the trained tokens when they were sampled, in nats",
    "logprobs/std": "standard deviation of these",
    "logprobs/min": "lowest of these",
    "logprobs/p50": "median of these",
    "logprobs/mean_training": "mean log-probability of the same tokens in training, in nats",
    "logprobs/std_training": "standard deviation of these",
    "logprobs/min_training": "lowest of these",
    "logprobs/p50_training": "median of these",
    "logprobs/diff": "mean difference of the two, sampling minus training, in nats per token",
    "logprobs/gap": "mean absolute difference of the two, in nats per token",
    "loss/clipped_share": "share of the tokens whose probability ratio is outside the bounds of "
    "the loss; of the sequences for gspo",
    "optim/grad_norm": "norm of the gradient before it is clipped",
    "optim/NAME": "what else the server says of the update",
    "staleness/mean": "updates between the sampling of a token and its training, mean",
    "staleness/max": "the same, the most",
    "weights/change": "mean absolute change of a token's log-probability by the newest update, "
    "in nats per token",
    "weights/sampler_gap": "difference between sampler and trainer where they were compared, in "
    "nats per token",
    "rollouts/invalid": "rollouts without a usable score since the step before",
    "rollouts/raised": "groups in whose scoring the environment raised since the step before",
    "rollouts/dropped": "rollouts that the environment left out since the step before: equal "
    "scores, length, or size of the group",
    "rollouts/truncated_share": "share of the answers since the step before that reached their "
    "length limit, from 0 to 1",
    "queue/refused": "groups that the rollout API has refused since it started",
    "queue/dropped": "groups that the rollout API has dropped since it started, as too many waited",
    "tokens/prefill": "tokens of prompts since the step before",
    "tokens/sampled": "tokens that were sampled since the step before",
    "tokens/trained": "tokens that were trained on since the step before",
    "tokens/prefill_total": "tokens of prompts over all attempts",
    "tokens/sampled_total": "tokens that were sampled over all attempts",
    "tokens/trained_total": "tokens that were trained on over all attempts",
    "tokens_per_second/sampled": "sampled tokens per second of the step",
    "tokens_per_second/trained": "trained tokens per second of the step",
    "cost/step": "cost of the step, in US dollars",
    "cost/total": "cost over all attempts, in US dollars",
    "time/step": "duration of the step, in seconds",
    "time/rollouts": "seconds of the step that were spent waiting for rollouts",
    "time/train": "seconds of the step that were spent in training",
    "time/forward_backward": "seconds until the gradient was computed",
    "time/optim_step": "seconds until the update was made",
    "time/publish": "seconds until the sampler had the new weights",
    "time/checkpoint": "seconds of the checkpoint after the step before",
    "eval/step": "step of the weights that were evaluated; the line is that of the step at which "
    "the result arrived",
    "eval/percent_correct": "share of correct answers to held-out items, from 0 to 1",
    "eval/items": "number of held-out items",
    "eval/low": "lower end of the 95 % interval of that share (Wilson)",
    "eval/high": "upper end of that interval",
    "eval/seconds": "duration of the evaluation, in seconds",
    "eval/failed": "evaluations that failed since the line before",
    "eval/NAME": "what else the environment reports of held-out items",
    "eval_base/NAME": "the same of the base model, where training does not begin with it",
    "environments/NAME/reward_mean": "mean score of the rollouts of one of several environments",
    "environments/NAME/rollouts": "rollouts of one of several environments in the batch",
    "environments/NAME/eval/NAME": "held-out results of one of several environments",
    "environments/NAME/eval_base/NAME": "the same of the base model",
})  # fmt: skip


@functools.cache
def _compile_patterns() -> list[tuple[re.Pattern[str], str]]:
    """Return a pattern per name with a part in capitals."""
    return [
        (re.compile(re.escape(name).replace("NAME", "[^ ]+")), meaning)
        for name, meaning in METRIC_MEANINGS.items()
        if "NAME" in name
    ]


def describe_metric(name: str) -> str:
    """Return the meaning of a metric; an empty string for an unknown metric."""
    if name in METRIC_MEANINGS:
        return METRIC_MEANINGS[name]
    matches = (text for pattern, text in _compile_patterns() if pattern.fullmatch(name))
    return next(matches, "")
