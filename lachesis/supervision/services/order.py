"""List the roles of a run's services in the order of their start, in a single table.

They end in the reverse order. Where several services stand still, the one that was started last is
named first, because it waits for nobody.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServiceRole:
    """Describe the role of a service in a run."""

    name: str
    title: str
    """Names the service in a sentence."""
    has_port: bool = True
    starts_at_once: bool = False
    """Whether it starts while the services before it are not ready yet."""


ROLES = (
    ServiceRole("backend", "the back end", starts_at_once=True),
    ServiceRole("engine", "the engine", starts_at_once=True),
    ServiceRole("api", "the Atropos API", starts_at_once=True),
    ServiceRole("trainer", "the inference server"),
    ServiceRole("environment", "the environment", has_port=False),
)
START_ORDER = tuple(role.name for role in ROLES)
PORT_NAMES = tuple(role.name for role in ROLES if role.has_port)
TITLES = {role.name: role.title for role in ROLES}


def get_service_role(service: str) -> str:
    """Return the role of a service; `environment-reverse_text` has the role `environment`."""
    return service.partition("-")[0]
