"""Say where the endpoint of a model is, and what an environment under test needs to call it."""

from __future__ import annotations

import os

from lachesis.base.errors import ConfigError
from lachesis.base.keys import read_key
from lachesis.config.profiles import get_endpoint_key_name

OPENROUTER_URL = "https://openrouter.ai/api/v1"


def find_endpoint() -> tuple[str, dict[str, str]]:
    """Return the URL of the endpoint in this process's variables, and the variables by which the
    process of an environment gets its key.

    Raises:
        ConfigError: The URL is not one, or has a password, which would be in files.
    """
    import httpx

    url = (os.environ.get("OPENAI_BASE_URL") or OPENROUTER_URL).rstrip("/")
    try:
        parsed_url = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"$OPENAI_BASE_URL is not an address: {error}") from None
    if parsed_url.userinfo:
        raise ConfigError(
            f"$OPENAI_BASE_URL holds a user name or a password for {parsed_url.host}; set the "
            "address alone, and the key as $OPENAI_API_KEY"
        )
    return url, {
        "LACHESIS_INFERENCE_URL": url,
        "LACHESIS_INFERENCE_TOKEN": read_key(get_endpoint_key_name()),
        "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER": "1",
    }
