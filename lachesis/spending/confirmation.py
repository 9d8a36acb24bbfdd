"""Ask for a confirmation, with the expected cost, before a run costs money.

On a paid profile a run begins only if its user has agreed: on the command line by an answer or
`--yes`, over the tools and HTTP by `confirm` with the fingerprint of the preview, in Prefect by the
parameter `confirmed`. A limit of the money that was stated for the run, `limits.max_cost_usd`,
counts as a yes everywhere.
"""

import hashlib
import json
from collections.abc import Mapping

from lachesis.base.errors import ConfirmationError
from lachesis.base.formatting import format_dollars, format_range, shorten_count
from lachesis.base.json_text import Json
from lachesis.config.backends import BACKENDS
from lachesis.config.launch_spec import LaunchSpec
from lachesis.config.prices import find_hourly_price
from lachesis.config.profiles import PROFILES

LIMIT_FIELD = "limits.max_cost_usd"


def needs_confirmation(profile: str, set_fields: Mapping[str, object]) -> bool:
    """Return whether a start has to be confirmed.

    Args:
        profile: Where the run trains.
        set_fields: The fields that its user has set, by name or SECTION.NAME.
    """
    # A run of a later release may have a profile that this one does not know.
    is_paid = profile not in PROFILES or PROFILES[profile].is_paid
    backend = _get_field(set_fields, "tinker.backend")
    # An engine that is started on this machine bills nobody, unless the owner has given a price.
    if backend in BACKENDS:
        is_paid = bool(find_hourly_price(str(backend)))
    return is_paid and _get_field(set_fields, LIMIT_FIELD) is None


def _get_field(set_fields: Mapping[str, object], name: str) -> object:
    return set_fields.get(name, set_fields.get(name.partition(".")[2]))


def require_confirmation(spec: LaunchSpec, forecast: Json | None) -> None:
    """Raise ConfirmationError if a launch that nobody has confirmed costs money without a limit."""
    if not needs_confirmation(spec.profile, spec.list_edits()):
        return
    raise ConfirmationError(
        f"a run on profile {spec.profile} costs money, and nobody has agreed to it: "
        f"{describe_cost(forecast)}. Nothing was started. `--yes` (`confirm` for a tool, "
        "`confirmed` in Prefect) starts it, and so does a limit, such as "
        f"--set {LIMIT_FIELD}={_propose_limit(forecast)}",
        forecast=forecast,
    )


def describe_cost(forecast: Json | None) -> str:
    """Return the expected cost of a run as a range, with its basis."""
    if not forecast:
        return "there is no forecast, because no test of this model and code has measured one"
    planned = forecast["planned"]
    tokens = format_range(forecast["tokens"]["low"], forecast["tokens"]["high"], shorten_count)
    parts = [
        f"{planned['total_steps']} steps of {planned['batch_size']} rollouts take "
        f"{tokens} tokens and "
        f"{format_money(forecast.get('cost_usd')) or 'no known amount of money'}"
    ]
    if (evaluations := forecast.get("evaluation_cost_usd")) and evaluations["expected"]:
        parts.append(
            f"{format_money(evaluations)} of it for {planned['evaluations']} held-out evaluations "
            f"of {planned['evaluation_answers']} answers"
        )
    if (storage := forecast.get("storage_gb")) is not None:
        text = f"{planned['kept_checkpoints']} kept checkpoints of about {storage:.2g} GB together"
        if (monthly := forecast.get("storage_usd_per_month")) is not None:
            text += f", {format_dollars(monthly)} a month until they are deleted"
        parts.append(text)
    parts.append(f"based on {forecast['basis']}")
    return "; ".join(parts)


def format_money(cost: Mapping[str, float] | None) -> str | None:
    """Return a range of US dollars, with its middle."""
    if cost is None:
        return None
    span = format_range(cost["low"], cost["high"], format_dollars)
    return f"{span} (expected {format_dollars(cost['expected'])})"


def make_fingerprint(shown: Json) -> str:
    """Return the fingerprint of what a preview has shown; a yes to it is a yes to nothing else."""
    text = json.dumps(shown, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _propose_limit(forecast: Json | None) -> str:
    cost = (forecast or {}).get("cost_usd")
    if not cost:
        return "5"
    return f"{1.25 * cost['high']:.2g}"
