"""Properties that hold for any input, tried on generated examples."""

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings


def examples(*strategies: Any, count: int = 40) -> Callable[[Any], Any]:
    """Try a test on so many examples."""

    def decorate(test: Any) -> Any:
        options = settings(max_examples=count, suppress_health_check=[HealthCheck.too_slow])
        return options(given(*strategies)(test))

    return decorate
