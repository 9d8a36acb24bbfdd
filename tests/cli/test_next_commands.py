"""What a command says to do next can be copied as it stands."""

import pytest

from lachesis.cli.commands import inference_tests
from lachesis.inference_tests.store import InferenceRequest, InferenceTest, InferenceTestStore
from lachesis.reporting.inference_test_view import InferenceTestView
from tests.harness.command_line import parse_command

TRAIN = "--require-validation --watch"


@pytest.mark.parametrize(
    ("given", "then"),
    [
        (["sums"], f"lachesis train sums {TRAIN}"),
        (
            ["./my sums.py", "--set", "words=9"],
            f"lachesis train './my sums.py' --set words=9 {TRAIN}",
        ),
        (["sums", "--model", "embedded:tiny"], f"lachesis train sums --model tiny {TRAIN}"),
        (
            ["sums", "--model", "Qwen/Qwen3-0.6B"],
            f"lachesis train sums --model Qwen/Qwen3-0.6B {TRAIN}",
        ),
        (["sums", "--endpoint-model", "qwen/qwen3-8b"], f"lachesis train sums {TRAIN}"),
        (["sums", "--model", "taught"], f"lachesis train sums --model {{folder}} {TRAIN}"),
        (
            ["sums", "--model", "embedded:{folder}"],
            f"lachesis train sums --model {{folder}} {TRAIN}",
        ),
        (["sums", "--model", "taught", "--model", "."], f"lachesis train sums {TRAIN}"),
        (["sums", "--profile", "tinker"], "lachesis train sums --profile tinker --watch"),
        (
            ["sums", "--profile", "tinker", "--model", "Qwen/Qwen3-8B"],
            "lachesis train sums --profile tinker --model Qwen/Qwen3-8B --watch",
        ),
        (
            ["sums", "--profile", "tinker", "--endpoint-model", "qwen/qwen3-8b"],
            "lachesis train sums --profile tinker --watch",
        ),
    ],
)
def test_after_a_test_comes_the_training_of_the_same(tmp_path, monkeypatch, given, then):
    folder = tmp_path / "taught"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    spec = inference_tests.read_test_spec(
        parse_command(["test", *(word.format(folder=folder) for word in given)])
    )
    request = InferenceRequest(
        environment=spec.environment, environment_file=spec.environment, models=[], spec=spec
    )
    test = InferenceTest(test_id="a" * 8, request=request)
    view = InferenceTestView(test, InferenceTestStore(tmp_path))
    assert view.train_command == then.format(folder=folder)
