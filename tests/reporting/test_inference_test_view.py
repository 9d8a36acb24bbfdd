"""Terminal, page, Prefect's artifact and tool say the same of an inference test."""

import html
import re
import shlex
from typing import Any

import pytest
from starlette.testclient import TestClient

from lachesis.agent_tools.inference_tests import wait_for_test
from lachesis.agent_tools.session import AgentSession
from lachesis.cli.commands.inference_tests import render_test
from lachesis.config.launch_spec import TestSpec
from lachesis.inference_tests.store import InferenceRequest, InferenceTest, InferenceTestStore
from lachesis.monitor.prefect_artifacts import render_test_verdict
from lachesis.reporting.inference_test_view import InferenceTestView
from lachesis.runs.store import RunStore
from lachesis.web.app import create_app
from tests.reporting.test_learning_shown import printed

HOSTILE = "it raised <b>| `*_[x](y)\x1b[31m"
FOLLOWS = {
    "learnable": "lachesis train",
    "too easy": "harder items",
    "too hard": "easier items",
    "broken": "fix what the stages",
}


@pytest.fixture
def store(clean_environment):
    return InferenceTestStore(clean_environment)


def add_test(store, word, file, **changes):
    """Store a test with a verdict, or one of a user's own prompts, and return its id."""
    spec = TestSpec(environment="sums", settings={"env.words": "a b"})
    request = InferenceRequest(
        environment="sums", environment_file=str(file), models=["embedded:tiny"], spec=spec
    )
    result: dict[str, Any] = {
        "model": "embedded:tiny", "name": "tiny", "scale": "embedded", "wandb_run": "", "steps": [],
        "output_file": "", "log_file": "", "steps_tested": 4, "total_completions": 32,
        "correct_completions": 8, "accuracy": 0.25, "steps_with_correct": 2,
        "step_success_rate": 0.5, "accuracy_interval": {"items": 4, "low": 0.046, "high": 0.699},
    }  # fmt: skip
    if word is None:
        answer = {"text": HOSTILE, "score": None}
        result["prompts"] = [{"prompt": "1+1=", "responses": [answer]}]
    else:
        result["verdict"] = {
            "word": word, "evidence": [HOSTILE], "groups": 4, "reward_mean": 0.25,
            "reward_std": 0.4, "reward_spread": 0.3, "zero_signal_share": 0.5,
            "truncation_rate": None, "invalid_rate": 0.0,
            "intervals": {"zero_signal_share": [0.15, 0.85]},
        }  # fmt: skip
    summary = {
        "steps_requested": 4, "models_tested": 1, "models_succeeded": 1, "best_model": None,
        "avg_accuracy": 0.25, "environment_working": word != "broken", "output_directory": "",
        **({"verdict": word} if word else {}),
    }  # fmt: skip
    test = store.create(request, "").model_copy(
        update={
            "status": "completed",
            "result": {"models_tested": [result], "summary": summary},
            **changes,
        }
    )
    store.save(test)
    return test.test_id


def ask_surfaces(store, test_id):
    """Return what each surface says of a test, as plain text."""
    view = InferenceTestView(store.load(test_id), store)
    with TestClient(create_app(store=RunStore(store.home)), base_url="http://localhost") as client:
        page = client.get(f"/tests/{test_id}").text
    words = html.unescape(re.sub("<[^>]*>", " ", page.partition("<main")[2]))
    return {
        "terminal": " ".join(printed(render_test(view), 1000).split()),
        "page": " ".join(words.split()),
        "artifact": html.unescape(render_test_verdict(view).replace("\\", "")),
    }


@pytest.mark.parametrize("word", FOLLOWS)
def test_all_surfaces_say_the_verdict_and_what_follows(store, tmp_path, word):
    test_id = add_test(store, word, tmp_path / "my sums.py")
    texts = ask_surfaces(store, test_id)
    for surface, text in texts.items():
        assert word in text, surface
        assert "0.250" in text, surface
        assert "0.046 to 0.699" in text, surface
    for surface in ("terminal", "artifact"):
        assert FOLLOWS[word] in texts[surface], surface
    answer = wait_for_test(AgentSession("x"), test_id, lambda *_: None)
    (next_step,) = answer["next_steps"]
    assert next_step == "rl_start_training()" or FOLLOWS[word] in next_step


def test_the_training_that_follows_is_quoted_and_has_the_settings_and_the_file(store, tmp_path):
    file = tmp_path / "my sums.py"
    view = InferenceTestView(store.load(add_test(store, "learnable", file)), store)
    assert shlex.split(view.train_command) == [
        "lachesis", "train", str(file), "--set", "env.words=a b", "--require-validation", "--watch",
    ]  # fmt: skip
    text = ask_surfaces(store, view.test.test_id)
    assert view.train_command in text["page"]
    assert view.train_command in text["terminal"]


def test_text_of_a_model_is_no_markup_in_prefect(store, tmp_path):
    view = InferenceTestView(store.load(add_test(store, "broken", tmp_path)), store)
    artifact = render_test_verdict(view)
    assert "<b>" not in artifact
    assert r"\|" in artifact
    assert r"\[x\](y)" in artifact


def test_prompts_of_a_user_have_no_verdict(store, tmp_path):
    view = InferenceTestView(store.load(add_test(store, None, tmp_path)), store)
    assert (view.lead, view.mark.word) == ("The models have answered.", "answered")
    assert "(no score)" in view.models[0].answered_prompts[0]


@pytest.mark.parametrize(("status", "lead"), [("running", "It is being tested."),
                                              ("failed", "It could not be tested.")])  # fmt: skip
def test_a_test_without_a_result_says_why(store, tmp_path, status, lead):
    error = "the disk is full\nTraceback" if status == "failed" else None
    changes = {"status": status, "result": None, "error": error}
    test: InferenceTest = store.load(add_test(store, "broken", tmp_path, **changes))
    view = InferenceTestView(test, store)
    assert view.lead == lead
    assert view.lead_rest == ("The disk is full." if error else "")
    assert view.models == []
