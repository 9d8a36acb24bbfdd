"""Enforce the owner's policy on agents: allowed starts and the total cost.

Every launch, test and resume by an agent passes here. A run by an agent that may cost money gets
the limit `limits.max_cost_usd` that the policy leaves to it, so that it stops by itself.
"""

import math
from pathlib import Path

from lachesis.base.errors import ConfigError, LachesisError, PolicyError
from lachesis.base.timestamps import seconds_between
from lachesis.config.launch_spec import TestSpec
from lachesis.config.owner_policy import FILE_NAME, AgentPolicy, load_policy
from lachesis.config.prices import TokenCounts
from lachesis.config.profiles import PROFILES
from lachesis.config.run_config import RunConfig, check_cost_limit
from lachesis.inference_tests.store import EMBEDDED, TINKER, InferenceTestStore, get_model_name
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore
from lachesis.spending.ledger import LedgerEntry, compute_run_cost, read_ledger

DAY_S = 86_400.0


def restrict_run(config: RunConfig, store: RunStore, resumed: RunRecord | None = None) -> RunConfig:
    """Return an agent's configuration with the money limit that the owner's policy leaves to it.

    The limit of a `resumed` run is about all of its attempts.

    Raises:
        PolicyError: The policy does not allow the run.
        ConfigError: The policy limits money, and no price of the model is known.
    """
    policy = load_policy(store.home)
    policy.require_profile(config.profile)
    policy.require_environments(config.build_environment_configs())
    policy.require_model(config.openai.model_name)
    # Free runs cost nothing, however long they take.
    if not PROFILES[config.profile].is_paid or not policy.limits_cost:
        return config
    spent = compute_run_cost(store, resumed) if resumed else 0.0
    allowed, reason = _find_allowed_cost(policy, store, spent)
    limit = config.limits.max_cost_usd
    if limit is not None and limit > allowed:
        raise PolicyError(
            f"limits.max_cost_usd is {limit:g}; allowed for agents: at most {allowed:.4g} US "
            f"dollars, {reason}",
            allowed_usd=allowed,
        )
    limits = config.limits.model_copy(update={"max_cost_usd": limit or allowed})
    return check_cost_limit(config.model_copy(update={"limits": limits}))


def check_test(
    config: RunConfig, spec: TestSpec, models: list[str], store_home: Path
) -> float | None:
    """Return the most that an agent's test can cost in US dollars, if that is known.

    Raises:
        PolicyError: The policy does not allow the test.
    """
    policy = load_policy(store_home)
    policy.require_profile(config.profile)
    policy.require_environments([config.environment])
    for model in models:
        policy.require_model(get_model_name(model))
    max_cost_usd = compute_max_test_cost(config, spec, models)
    if policy.limits_cost:
        _require_known_endpoints(policy, models)
        if any(model.startswith(TINKER) for model in models):
            _require_test_money(policy, config, RunStore(store_home), max_cost_usd)
    return max_cost_usd


def _require_known_endpoints(policy: AgentPolicy, models: list[str]) -> None:
    """Raise PolicyError for a model at an endpoint, whose price is not known here."""
    for model in models:
        # What an endpoint costs is not known here, so the owner has to name such a model.
        if not model.startswith((EMBEDDED, TINKER)) and policy.models is None:
            raise PolicyError(
                f"the price of {model} at an endpoint is not known here, and the owner's "
                f"{FILE_NAME} limits what agents spend; allowed: models that it lists, "
                "`embedded:NAME`, `tinker:NAME`"
            )


def _require_test_money(
    policy: AgentPolicy, config: RunConfig, store: RunStore, max_cost_usd: float | None
) -> None:
    """Raise PolicyError if a test may cost more than agents have left."""
    if max_cost_usd is None:
        raise ConfigError(
            f"no price of {config.openai.model_name} is known, and the owner's {FILE_NAME} "
            "limits what agents spend; the owner adds it to $LACHESIS_HOME/prices.yaml"
        )
    allowed, reason = _find_allowed_cost(policy, store)
    if max_cost_usd > allowed:
        raise PolicyError(
            f"the test may cost up to {max_cost_usd:.4g} US dollars; allowed for agents: at most "
            f"{allowed:.4g}, {reason}; fewer groups or a smaller max_token_length cost less",
            allowed_usd=allowed,
        )


def compute_max_test_cost(config: RunConfig, spec: TestSpec, models: list[str]) -> float | None:
    """Return the cost of a test at Tinker whose texts are all as long as allowed, in US dollars.

    None if it costs nothing, or if no price is known.
    """
    num_models = sum(model.startswith(TINKER) for model in models)
    prices = config.prices
    if not num_models or prices is None:
        return None
    num_answers = spec.num_groups * spec.group_size * num_models
    num_tokens = num_answers * config.env.max_token_length
    return prices.compute_cost(TokenCounts(prefill=num_tokens, sampled=num_tokens))


def _find_allowed_cost(
    policy: AgentPolicy, store: RunStore, already_spent: float = 0.0
) -> tuple[float, str]:
    """Return the most that a run may cost over all attempts, in US dollars, and the reason."""
    per_run, per_day = policy.max_cost_usd_per_run, policy.max_cost_usd_per_day
    reason = f"by max_cost_usd_per_run of the owner's {FILE_NAME}"
    allowed = float("inf") if per_run is None else per_run
    if per_day is None:
        return allowed, reason
    committed = compute_committed_cost(store)
    left = _round_down_to_millionths(per_day - committed)
    if left <= 0:
        raise PolicyError(
            f"agents have spent or reserved {committed:.4g} US dollars in the last 24 hours; "
            f"allowed by max_cost_usd_per_day of the owner's {FILE_NAME}: {per_day:g}",
            allowed_usd=0.0,
        )
    if left + already_spent < allowed:
        reason = (
            f"as {committed:.4g} of the day's {per_day:g} (max_cost_usd_per_day of the owner's "
            f"{FILE_NAME}) are spent or reserved"
        )
        return _round_down_to_millionths(left + already_spent), reason
    return allowed, reason


def _round_down_to_millionths(usd: float) -> float:
    """Return an amount rounded down to whole millionths, so that rounding never exceeds a limit:
    neither a resumed run nor a sum of allowed amounts.
    """
    # An error of a binary fraction, as of 4.87 - 1e-15, must not cost a whole millionth.
    return math.floor(usd * 1e6 + 1e-3) / 1e6


def compute_committed_cost(store: RunStore) -> float:
    """Return the US dollars that agents' runs and tests have cost or may cost in these 24 hours.

    What has not ended counts with its limit, whenever it began.
    """
    entries = read_ledger(store.home).values()
    return sum(_compute_entry_cost(store, entry) for entry in entries if entry.by_agent)


def _compute_entry_cost(store: RunStore, entry: LedgerEntry) -> float:
    if not entry.is_open:
        return entry.compute_cost() if seconds_between(entry.at) < DAY_S else 0.0
    cost_usd, ended_at = _look_up_cost(store, entry)
    return cost_usd if ended_at is None or seconds_between(ended_at) < DAY_S else 0.0


def _look_up_cost(store: RunStore, entry: LedgerEntry) -> tuple[float, str | None]:
    """Return the cost of an attempt or test that is not settled, and when it ended, if it has."""
    kind, _, test_id = entry.key.partition("test-")
    try:
        if not kind:
            test = InferenceTestStore(store.home).load(test_id)
            ended_at = (test.ended_at or entry.at) if test.has_ended else None
            return entry.compute_cost(test.cost_usd), ended_at
        record = store.load(entry.key.partition("-")[0])
    except LachesisError:  # It was removed by hand, or was killed before it was made.
        return entry.compute_cost(), entry.at
    spent_usd = compute_run_cost(store, record)
    if record.has_ended or record.submission_key != entry.key:
        return entry.compute_cost(spent_usd), record.ended_at or entry.at
    # A run that goes on may use all that it is allowed.
    return entry.compute_cost(max(spent_usd, entry.promised_usd or 0.0)), None
