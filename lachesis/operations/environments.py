"""List and check environments, for all surfaces."""

from lachesis.environment_catalog.scan import scan_environments
from lachesis.environment_check.check import run_environment_checks
from lachesis.environment_check.stages import StageChild
from lachesis.environment_check.token_checks import CheckResult
from lachesis.supervision.leftovers import CHECK_PREFIX, remove_old_checks
from lachesis.supervision.running_services import ServiceGroup

__all__ = [
    "CHECK_PREFIX",
    "CheckResult",
    "ServiceGroup",
    "StageChild",
    "remove_old_checks",
    "run_environment_checks",
    "scan_environments",
]
