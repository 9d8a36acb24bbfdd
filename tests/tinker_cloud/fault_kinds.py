"""List the faults of the rehearsal cloud by the names under which they are asked for."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from tests.tinker_cloud import faults, other_makers
from tests.tinker_cloud.faults import Fault

FAULTS: dict[str, type[Fault]] = {
    fault.kind: fault
    for fault in (
        faults.Queued,
        faults.Unpaid,
        faults.Revoked,
        faults.RateLimit,
        faults.ServerError,
        faults.Cut,
        faults.Lost,
        faults.SessionExpired,
        faults.ModelRetired,
        faults.StaleSampler,
        faults.Bfloat16,
        faults.OrderNoise,
        faults.TimeToLive,
        faults.BrokenDownload,
        *other_makers.OTHER_MAKERS,
    )
}


def make_fault(content: dict[str, Any]) -> Fault:
    """Return the fault that `{"kind": …, OPTION: VALUE}` describes."""
    fault_class = FAULTS[content["kind"]]
    options = {name: value for name, value in content.items() if name != "kind"}
    unknown = options.keys() - {one.name for one in fields(fault_class)}
    assert not unknown, f"{fault_class.kind} has no option {', '.join(unknown)}"
    return fault_class(**options)
