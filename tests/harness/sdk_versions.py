"""Which version of the Tinker SDK the tests run with; `make sdk-matrix` runs some with others."""

import pytest
import tinker
from packaging.version import Version

INSTALLED = Version(tinker.__version__)


def needs_sdk(version: str, feature: str) -> pytest.MarkDecorator:
    """Skip a test with versions of the SDK that do not have a feature."""
    reason = f"tinker {INSTALLED} does not have {feature}, which came with {version} at the latest"
    return pytest.mark.skipif(Version(version) > INSTALLED, reason=reason)
