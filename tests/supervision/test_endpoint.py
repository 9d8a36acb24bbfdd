"""Where the endpoint of a model is, and which variables its client gets."""

import pytest

from lachesis.base.errors import ConfigError
from lachesis.supervision.services.inference_test import OPENROUTER_URL, find_endpoint


def test_an_endpoint_is_named_with_its_key_in_the_variables_only(monkeypatch):
    monkeypatch.setenv("OPENROUTER_API_KEY", "sk-openrouter-1")
    url, variables = find_endpoint()
    assert url == variables["LACHESIS_INFERENCE_URL"] == OPENROUTER_URL
    assert variables["LACHESIS_INFERENCE_TOKEN"] == "sk-openrouter-1"
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1/")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-openai-1")
    url, variables = find_endpoint()
    assert url == "http://127.0.0.1:9/v1"
    assert variables["LACHESIS_INFERENCE_TOKEN"] == "sk-openai-1"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:port/v1", "is not an address"),
        ("http://me:pass-word-1@127.0.0.1:9/v1", "holds a user name or a password"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_without_its_password(url, words, monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", url)
    with pytest.raises(ConfigError, match=words) as refused:
        find_endpoint()
    assert "pass-word" not in str(refused.value)
