"""An inference test leaves files that hold scores and reasons; they are read, and remarked on."""

import json
from pathlib import Path

import pytest
import yaml

from lachesis.base.reward_values import is_score
from lachesis.config import run_config
from lachesis.config.launch_spec import TestSpec
from lachesis.environment_process import rollout_counters
from lachesis.inference_tests.results import make_model_result
from lachesis.inference_tests.store import InferenceRequest, InferenceTestStore
from lachesis.inference_tests.verdict import InferenceCounts, judge_learnability
from lachesis.runs.environment_counters import read_counts
from lachesis.supervision.services.inference_test import make_process_config


def test_half_a_line_and_strange_scores_are_passed_over(tmp_path):
    output = tmp_path / "test_sums_m.jsonl"
    whole = json.dumps({"scores": [1.0, 0.0]})
    output.write_text(f'{whole}\n{{"scores": [1.0, null, "x", NaN]}}\n{{"scores": [1.0, 0\n')
    result = make_model_result(output, "m", "run", error=None, prompts=False)
    assert [step["scores"] for step in result["steps"]] == [[1.0, 0.0], [1.0]]


def test_two_models_have_two_files(tmp_path):
    """Also those of the same folder name; and a name that begins like another one is no file of its
    test.
    """
    tests = InferenceTestStore(tmp_path)
    models = ["z/glm-4", "z/glm-4.7", "embedded:/a/tiny", "embedded:/b/tiny"]
    test = tests.create(
        InferenceRequest(
            environment="e",
            environment_file="e.py",
            models=models,
            spec=TestSpec(environment="e", steps=1, group_size=1),
        ),
        "",
    )
    assert len({tests.get_output_file(test, model) for model in models}) == 4
    assert not set(tests.get_output_files(test, models[0])) & set(
        tests.get_output_files(test, models[1])
    )


def test_the_files_of_prompts_are_known_too(tmp_path):
    """They are scrubbed of the key and removed before another attempt like all others."""
    tests = InferenceTestStore(tmp_path)
    request = InferenceRequest(
        environment="e",
        environment_file="e.py",
        models=["m"],
        spec=TestSpec(environment="e", prompts=["p"]),
    )
    test = tests.create(request, "")
    config = run_config.resolve_run_config(
        "sums", "embedded", {"env": {"kind": "sound"}}, model=str(tmp_path)
    )
    content = yaml.safe_load(
        make_process_config(config, request.spec, tests.get_output_file(test, "m"), {}, "run")
    )
    assert Path(content["env"]["data_path_to_save_groups"]) in tests.get_output_files(test, "m")
    assert tests.get_output_file(test, "m") in tests.get_output_files(test, "m")


def test_the_reason_of_a_failure_is_the_evidence_and_holds_no_part_of_a_key(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "sk-0123456789abcdef")
    counts = rollout_counters.RolloutCounters(tmp_path / "counters.json")
    counts.count_error("ValueError: " + "x" * 280 + " sk-0123456789abcdef")
    counts.count_error("half an emoji \ud83d")
    counts.write()
    file_counts = read_counts(tmp_path / "counters.json")
    assert file_counts is not None
    assert "sk-0" not in json.dumps(file_counts)
    assert json.dumps(file_counts["errors"], ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("scores", "word", "said"),
    [
        ([[0.5, 0.5000000001], [0.5, 0.5]], "too easy", "4 of 4 rollouts score above 0"),
        ([[1.0, 1.0], [1.0, 1.0]], "too easy", "all 4 scores are 1"),
        ([[-1.0, -1.0], [-1.0, -1.0]], "too hard", "all 4 scores are -1"),
    ],
)
def test_scores_that_are_all_the_same_are_remarked(scores, word, said):
    verdict = judge_learnability(InferenceCounts(scores_P=scores))
    assert verdict.word == word
    assert said in " ".join(verdict.evidence)
    assert not is_score(1.7e308), "sums of such are infinite"
