"""Properties that hold for any input, tried on generated examples."""

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings


def examples(*strategies: Any, count: int = 40) -> Callable[[Any], Any]:
    """Try a test on so many examples, without a limit of time: the machine may be busy with
    something else.
    """

    def decorate(test: Any) -> Any:
        options = settings(
            max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        )
        return options(given(*strategies)(test))

    return decorate
