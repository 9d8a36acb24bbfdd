"""Find out what a Tinker server means by each request, by its behaviour and never by its name.

A probe asks one question, such as whether a sampling client keeps its weights when newer ones are
published. Each compares numbers that must agree or must differ on Tinker itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import tinker

from lachesis.base.arrays import Array
from lachesis.base.errors import LachesisError, shorten
from lachesis.base.tinker_client import name_refused_answers
from lachesis.tinker_conformance.answer_shape import LOSS_SUM, check_loss_output
from lachesis.tinker_conformance.session import (
    TEXT,
    BackendSession,
    make_checkpoint_name,
    make_policy_datum,
    make_text_datum,
)

Outcome = Literal["as Tinker", "differs", "fails", "not determined"]
# A difference that rounding explains, in nats; bfloat16 on both sides stays below.
MAX_NOISE = 0.05
# Two values that must be the same ones may differ by this share of what training has changed.
MAX_SHARE = 0.25
# Below this many nats an update has changed too little to see where its effect is.
MIN_EFFECT = 1e-3


@dataclass(frozen=True)
class ProbeResult:
    """Hold the answer to one question."""

    outcome: Outcome
    text: str


@dataclass(frozen=True)
class BackendProbe:
    """Ask one question about a server.

    `is_needed` says whether training would be wrong, or impossible, if it differs from Tinker.
    """

    name: str
    question: str
    is_needed: bool
    ask: Callable[[BackendSession], ProbeResult]

    def run(self, session: BackendSession) -> ProbeResult:
        """Return the answer; an error of the server is one too."""
        try:
            with name_refused_answers():
                return self.ask(session)
        except (LachesisError, tinker.TinkerError, ValueError, KeyError, TypeError) as error:
            return ProbeResult("fails", shorten(f"{type(error).__name__}: {error}", 300))


def _judge(is_same: bool, same: str, different: str) -> ProbeResult:
    if is_same:
        return ProbeResult("as Tinker", same)
    return ProbeResult("differs", different)


def _judge_unmoved(gap: float, effect: float, same: str, different: str) -> ProbeResult:
    """Judge weights that must stay while an update changes others by `effect`, both in nats."""
    if effect < MIN_EFFECT:
        return ProbeResult("not determined", f"the update changed {effect:.1e} nats only")
    return _judge(gap <= MAX_SHARE * effect, same, different)


def _gap(first: Array, second: Array) -> float:
    """Return the mean absolute difference in nats."""
    return float(np.abs(first - second).mean())


def ask_base(session: BackendSession) -> ProbeResult:
    """Sample the base model, and request the log-probabilities of a prompt."""
    base = session.sample_base()
    samples = session.sample(base, num_samples=4)
    session.compute_logprobs(base)
    lengths = [len(sample.tokens) for sample in samples]
    return _judge(
        max(lengths) <= 8, "4 samples, log-probabilities N", f"samples of {lengths} tokens, not 8"
    )


def ask_fresh_adapter(session: BackendSession) -> ProbeResult:
    """Compare an adapter that was not trained with the base model."""
    base = session.compute_logprobs(session.sample_base())
    fresh = session.compute_logprobs(session.publish(session.get_adapter()))
    gap = _gap(base, fresh)
    return _judge(gap <= MAX_NOISE, f"{gap:.1e} nats apart", f"{gap:.2f} nats apart")


def ask_training(session: BackendSession) -> ProbeResult:
    """Take a few supervised steps, which must lower the loss of their text."""
    adapter = session.get_adapter()
    before = session.compute_training_logprobs(adapter).mean()
    session.train(adapter)
    after = session.compute_training_logprobs(adapter).mean()
    return _judge(
        after > before,
        f"the text became likelier, {before:.2f} to {after:.2f} nats a token",
        f"the text did not become likelier, {before:.2f} to {after:.2f} nats a token",
    )


def ask_sampler_of_training(session: BackendSession) -> ProbeResult:
    """Compare the published weights with those in training."""
    adapter = session.get_adapter()
    gap = _gap(
        session.compute_logprobs(session.publish(adapter)),
        session.compute_training_logprobs(adapter),
    )
    return _judge(
        gap <= MAX_NOISE, f"{gap:.1e} nats apart", f"{gap:.2f} nats apart: another policy answers"
    )


def ask_base_beside_adapter(session: BackendSession) -> ProbeResult:
    """Ask the base model again after an adapter was trained and published."""
    adapter, base = session.get_adapter(), session.sample_base()
    # The trainer computes what is base, because whatever the sampler says may be the adapter's.
    fresh = session.compute_training_logprobs(session.make_adapter())
    effect = _gap(session.compute_training_logprobs(adapter), fresh)
    session.compute_logprobs(session.publish(adapter))
    gap = _gap(session.compute_logprobs(base), fresh)
    if effect < MAX_NOISE:
        return ProbeResult("not determined", f"the adapter changes {effect:.1e} nats only")
    return _judge(
        gap <= max(1e-3, MAX_SHARE * effect),
        f"base and a fresh adapter are {gap:.1e} nats apart, the trained one {effect:.2f}",
        f"base is {gap:.2f} nats from a fresh adapter, as far as the trained one ({effect:.2f})",
    )


def ask_snapshots(session: BackendSession) -> ProbeResult:
    """Ask an old sampling client again after newer weights were published."""
    adapter = session.get_adapter()
    old = session.publish(adapter)
    before = session.compute_logprobs(old)
    session.train(adapter)
    effect = _gap(session.compute_logprobs(session.publish(adapter)), before)
    gap = _gap(session.compute_logprobs(old), before)
    return _judge_unmoved(
        gap,
        effect,
        f"the old client moved by {gap:.1e} nats, the weights by {effect:.2f}",
        f"the old client moved by {gap:.2f} nats, as the weights did ({effect:.2f})",
    )


def ask_old_client_and_training(session: BackendSession) -> ProbeResult:
    """Look whether sampling from an old client changes the weights in training."""
    adapter = session.get_adapter()
    old = session.publish(adapter)
    before = session.compute_training_logprobs(adapter)
    session.train(adapter)
    trained = session.compute_training_logprobs(adapter)
    session.sample(old)
    after, effect = session.compute_training_logprobs(adapter), _gap(trained, before)
    gap = _gap(after, trained)
    return _judge_unmoved(
        gap,
        effect,
        f"the weights in training moved by {gap:.1e} nats",
        f"the weights in training moved back by {gap:.2f} nats: updates were lost",
    )


def ask_unpublished(session: BackendSession) -> ProbeResult:
    """Look whether an update can be sampled before it was published."""
    adapter = session.get_adapter()
    client = session.publish(adapter)
    before = session.compute_logprobs(client)
    trained_before = session.compute_training_logprobs(adapter)
    session.train(adapter)
    effect = _gap(session.compute_training_logprobs(adapter), trained_before)
    gap = _gap(session.compute_logprobs(client), before)
    return _judge_unmoved(
        gap,
        effect,
        f"the client moved by {gap:.1e} nats, the weights by {effect:.2f}",
        f"the client moved by {gap:.2f} nats without a publication",
    )


def ask_policy_loss(session: BackendSession) -> ProbeResult:
    """Make a pass of the policy-gradient loss, with twice the same rollout."""
    adapter = session.get_adapter()
    logprobs = session.compute_training_logprobs(adapter)
    sums = []
    for number in (1, 2):
        datums = [make_policy_datum(logprobs)] * number
        output = adapter.forward_backward(datums, "importance_sampling").result()
        check_loss_output(output, [len(TEXT) - 1] * number)
        sums.append(float(output.metrics[LOSS_SUM]))
    adapter.optim_step(tinker.AdamParams(learning_rate=0.0)).result()
    expected = -float(len(TEXT) - 1)
    is_sum = abs(sums[0] - expected) < 0.2 * abs(expected) and abs(sums[1] / sums[0] - 2) < 0.2
    return _judge(
        is_sum,
        f"the loss of one and of two equal rollouts is {sums[0]:.2f} and {sums[1]:.2f}: a sum",
        f"the loss of one and of two equal rollouts is {sums[0]:.2f} and {sums[1]:.2f}, not "
        f"{expected:.2f} and {2 * expected:.2f}: a mean",
    )


def ask_gradient_of_sums(session: BackendSession) -> ProbeResult:
    """Look whether twice the same datum doubles the gradient."""
    norms: list[float | None] = []
    for number in (1, 2):
        adapter = session.make_adapter()
        datums = [make_text_datum()] * number
        adapter.forward_backward(datums, "cross_entropy").result()
        metrics = adapter.optim_step(tinker.AdamParams(learning_rate=0.0)).result().metrics or {}
        values = [value for key, value in metrics.items() if key.startswith("grad_norm")]
        norms.append(values[0] if values else None)
    if not norms[0] or not norms[1]:
        return ProbeResult("not determined", "the server names no grad_norm")
    ratio = norms[1] / norms[0]
    return _judge(
        1.6 < ratio < 2.4,
        f"the norm of the gradient becomes {ratio:.2f} times as large",
        f"the norm of the gradient becomes {ratio:.2f} times as large, not twice: a mean",
    )


def ask_clipping(session: BackendSession) -> ProbeResult:
    """Look whether `grad_clip_norm` changes an update."""
    moved = []
    for options in ({}, {"grad_clip_norm": 1e-12}):
        adapter = session.make_adapter()
        before = session.compute_training_logprobs(adapter)
        session.train(adapter, num_updates=2, **options)
        moved.append(_gap(session.compute_training_logprobs(adapter), before))
    if moved[0] < 1e-4:
        return ProbeResult("not determined", f"two updates changed {moved[0]:.1e} nats only")
    return _judge(
        moved[1] < 0.5 * moved[0],
        f"updates of {moved[0]:.2e} nats, clipped to nearly nothing {moved[1]:.1e}",
        f"updates of {moved[0]:.2e} nats, clipped to nearly nothing {moved[1]:.2e}: ignored",
    )


def ask_checkpoint(session: BackendSession) -> ProbeResult:
    """Save the state, and load it as a new adapter."""
    adapter = session.get_adapter()
    state = adapter.save_state(make_checkpoint_name()).result().path
    saved = session.compute_training_logprobs(adapter)
    gap = _gap(session.compute_training_logprobs(session.load(state)), saved)
    return _judge(gap <= MAX_NOISE, f"{gap:.1e} nats apart", f"{gap:.2f} nats apart")


def ask_seeds(session: BackendSession) -> ProbeResult:
    """Sample with equal and with different seeds."""
    base = session.sample_base()
    drawn = [
        list(session.sample(base, seed=seed, max_tokens=16)[0].tokens) for seed in (3, 3, 4, 5)
    ]
    if drawn[0] != drawn[1]:
        return ProbeResult("differs", "the same seed gave two answers: it is ignored")
    return _judge(
        drawn[0] != drawn[2] or drawn[0] != drawn[3],
        "the same seed gives the same tokens, another one others",
        "three seeds gave the same tokens",
    )


def ask_batches(session: BackendSession) -> ProbeResult:
    """Probe whether the log-probabilities of a prompt depend on the other requests of a batch."""
    base = session.sample_base()
    alone = session.compute_logprobs(base)
    texts = [TEXT, *(TEXT[: 4 + number] for number in range(8))]
    prompts = [tinker.ModelInput.from_ints(text) for text in texts]
    futures = [base.compute_logprobs(prompt) for prompt in prompts]
    beside = np.asarray(futures[0].result()[1:], np.float64)
    for future in futures[1:]:
        future.result()
    gap = float(np.abs(alone - beside).max())
    return _judge(
        gap <= 1e-3, f"at most {gap:.1e} nats", f"at most {gap:.1e} nats: ratios are not exact"
    )


def ask_stop_tokens(session: BackendSession) -> ProbeResult:
    """Look whether an answer ends with a stop token, which belongs to it."""
    base = session.sample_base()
    greedy: Any = session.sample(base, temperature=0.0)[0]
    stop = list(greedy.tokens)[2]
    end = list(greedy.tokens).index(stop) + 1
    answer = session.sample(base, temperature=0.0, stop=[stop])[0]
    tokens, reason = list(answer.tokens), str(answer.stop_reason)
    return _judge(
        tokens == list(greedy.tokens)[:end] and reason == "stop",
        "it ends with its stop token",
        f"{tokens} ({reason}) where {list(greedy.tokens)[:end]} (stop) was expected",
    )


def ask_end_tokens(session: BackendSession) -> ProbeResult:
    """Look whether an answer ends at the model's own end token when no stop is named."""
    base = session.sample_base()
    end_ids = session.read_end_ids()
    answers = session.sample(base, num_samples=32, max_tokens=128, stop=None)
    reached = [answer for answer in answers if end_ids & set(answer.tokens)]
    if not reached:
        return ProbeResult("not determined", "no answer of 128 tokens has reached an end token")
    ended = [answer for answer in reached if answer.tokens[-1] in end_ids]
    return _judge(
        len(ended) == len(reached),
        f"{len(ended)} of {len(reached)} answers with an end token end there",
        f"{len(reached) - len(ended)} of {len(reached)} answers go on after their end token",
    )


def ask_alpha(session: BackendSession) -> ProbeResult:
    """Compare the first updates of adapters of two ranks, whose scale is alpha / rank.

    Adam moves each element of B by the learning rate at first, whatever the gradient. The change
    of a log-probability is then proportional to the scale and to the rank, so with one alpha for
    all ranks it is nearly the same, and with alpha = 2 x rank it doubles with the rank.
    """
    small, large = (session.measure_first_change(rank) for rank in (4, 16))
    if min(small, large) < 1e-4:
        return ProbeResult("not determined", f"the updates changed {min(small, large):.1e} nats")
    ratio = large / small
    return _judge(
        ratio < 2.0,
        f"an update with four times the rank changes {ratio:.2f} times as much: one alpha",
        f"an update with four times the rank changes {ratio:.2f} times as much: alpha grows",
    )


PROBES = (
    BackendProbe("base", "Can the base model be sampled?", True, ask_base),
    BackendProbe("fresh adapter", "Is a fresh adapter the base model?", True, ask_fresh_adapter),
    BackendProbe("training", "Does a supervised step lower the loss?", True, ask_training),
    BackendProbe(
        "sampler", "Does the sampler have the trained weights?", True, ask_sampler_of_training
    ),
    BackendProbe("base beside adapter", "Is base still base?", True, ask_base_beside_adapter),
    BackendProbe("snapshots", "Does an old client keep its weights?", True, ask_snapshots),
    BackendProbe(
        "old clients", "Do old clients leave training alone?", True, ask_old_client_and_training
    ),
    BackendProbe("unpublished", "Are updates hidden until published?", True, ask_unpublished),
    BackendProbe("policy loss", "Is the loss of a batch a sum?", True, ask_policy_loss),
    BackendProbe("gradient", "Do equal datums add up?", True, ask_gradient_of_sums),
    BackendProbe("alpha", "Is alpha the same at every rank?", False, ask_alpha),
    BackendProbe("checkpoint", "Does a saved state come back?", True, ask_checkpoint),
    BackendProbe("clipping", "Does grad_clip_norm clip?", False, ask_clipping),
    BackendProbe("seeds", "Do seeds fix the samples?", False, ask_seeds),
    BackendProbe("batches", "Is a text independent of others?", False, ask_batches),
    BackendProbe("stop tokens", "Does an answer end at its stop token?", True, ask_stop_tokens),
    BackendProbe("end tokens", "Does an answer end by itself?", True, ask_end_tokens),
)


def describe_verdict(findings: dict[str, ProbeResult]) -> str:
    """Say if a server suits the trainer: `fits`, `fits with limits: …`, `does not fit: …`."""
    bad = [
        probe
        for probe in PROBES
        if probe.name in findings and findings[probe.name].outcome in ("differs", "fails")
    ]
    if needed := [probe.name for probe in bad if probe.is_needed]:
        return f"does not fit: {', '.join(needed)}"
    if bad:
        return f"fits with limits: {', '.join(probe.name for probe in bad)}"
    return "fits"
