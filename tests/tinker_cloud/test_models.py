"""The list of models is the server's own, and what is said about a model is read in its files."""

import json

import pytest
from tinker.lib.base_url import DEFAULT_BASE_URL
from tinker_cookbook.hyperparam_utils import get_lr

from lachesis.agent_tools.session import AgentSession
from lachesis.agent_tools.tools import TOOLS, CallContext
from lachesis.base import tinker_client
from lachesis.base.errors import BillingError, MissingKeyError, ModelNotFoundError, ServerDownError
from lachesis.cli.main import main
from lachesis.launch.offered_models import fetch_and_describe, list_models, require_offered_model
from lachesis.models.chat_template import find_thinking_switch
from lachesis.models.recommended_settings import recommend_settings
from tests.tinker_cloud import templates
from tests.tinker_cloud.stand_ins import STAND_INS


def test_the_server_is_asked_for_its_models(cloud, clean_environment):
    answer = list_models("tinker", clean_environment)
    models = {model.name: model for model in answer.models}
    assert list(models) == list(STAND_INS)
    qwen = models["Qwen/Qwen3-8B"]
    assert (qwen.max_context_length, qwen.renderer) == (1024, "chat template")
    assert qwen.price is not None
    assert (qwen.price.prefill, str(qwen.price.dated)) == (0.195, "2026-10-07")
    assert (qwen.thinking, qwen.can_switch_thinking_off) == ("on or off", True)
    gpt = models["openai/gpt-oss-20b"]
    assert (gpt.thinking, gpt.can_switch_thinking_off) == (
        "reasoning_effort: low, medium, high",
        False,
    )
    assert models["Qwen/Qwen3-4B-Instruct-2507"].thinking == "does not think"


def test_the_tool_and_the_command_list_the_same(cloud, clean_environment, capsys):
    context = CallContext(AgentSession("test"))
    answer, is_error = TOOLS["rl_list_models"].run_safely(context, {"profile": "tinker"})
    assert not is_error
    assert main(["model", "list", "--profile", "tinker", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == answer
    assert main(["model", "show", "Qwen/Qwen3-8B", "--profile", "tinker"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "0.195 US dollars per million prompt tokens" in shown
    assert "carried over to a width of 64 by the cookbook's rule for Qwen" in shown


def test_a_model_that_is_not_offered_is_refused_with_what_is(cloud, clean_environment):
    require_offered_model("tinker", "Qwen/Qwen3-8B")
    with pytest.raises(ModelNotFoundError, match="did you mean Qwen/Qwen3-8B"):
        require_offered_model("tinker", "Qwen/Qwen3-9B")
    cloud.begin("model_retired", model="Qwen/Qwen3-8B")
    with pytest.raises(ModelNotFoundError, match="does not offer Qwen/Qwen3-8B for training"):
        fetch_and_describe("Qwen/Qwen3-8B", "tinker", clean_environment)


def test_who_cannot_ask_is_told_what_to_do(cloud, clean_environment, monkeypatch):
    cloud.begin("revoked")
    with pytest.raises(MissingKeyError, match=r"HTTP 401: Invalid or revoked.*set a valid key"):
        list_models("tinker", clean_environment)
    cloud.lift()
    cloud.begin("unpaid", calls=".*")
    with pytest.raises(BillingError, match=r"HTTP 402.*add credit.*lachesis resume"):
        list_models("tinker", clean_environment)
    cloud.lift()
    cloud.begin("server_error", calls=".*")
    with pytest.raises(ServerDownError, match="HTTP 503: The service is unavailable"):
        list_models("tinker", clean_environment)
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(ServerDownError, match="check the network, and TINKER_BASE_URL"):
        list_models("tinker", clean_environment)


def test_the_address_is_that_of_the_sdk():
    assert tinker_client.DEFAULT_BASE_URL == DEFAULT_BASE_URL


@pytest.mark.parametrize(
    ("template", "words", "can_be_off"),
    [
        (templates.QWEN3_THINKING, "on or off", True),
        (templates.QWEN3_INSTRUCT, "does not think", True),
        (templates.LLAMA3, "does not think", True),
        (templates.GPT_OSS, "reasoning_effort: low, medium, high", False),
        ("{% if thinking %}<think>{% endif %}", "on or off", True),
        ("{{ '<think>' }}", "always thinks", False),
    ],
)
def test_a_template_says_whether_its_model_thinks(template, words, can_be_off):
    switch = find_thinking_switch(template)
    assert (switch.describe(), switch.can_be_off) == (words, can_be_off)


def test_rates_are_carried_over_as_in_the_cookbook():
    """The ratio of two models is that of the cookbook's own function."""
    ours = recommend_settings("Qwen/Qwen3-8B", 4096).learning_rate
    reference = recommend_settings("meta-llama/Llama-3.1-8B-Instruct", 4096).learning_rate
    assert reference == 4e-5
    theirs = get_lr("Qwen/Qwen3-8B") / get_lr("meta-llama/Llama-3.1-8B-Instruct")
    assert ours / reference == pytest.approx(theirs, rel=0.02)
    unknown = recommend_settings("openai/gpt-oss-20b", 2880)
    assert "no rule is known for this family" in unknown.learning_rate_source
