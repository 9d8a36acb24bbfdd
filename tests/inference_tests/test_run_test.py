"""Whether an environment works and can be learned from: its real `process` command."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from prefect.exceptions import Pause

from flows.inference_test import inference_test
from lachesis.base.errors import HealthTimeoutError, LachesisError, ServerDownError, StageError
from lachesis.config import run_config as run_config
from lachesis.config.launch_spec import TestSpec
from lachesis.environment_check.stages import StageChild
from lachesis.environment_process.model_free_check import STAGE_NAMES
from lachesis.inference_tests import answer_items, run_test
from lachesis.inference_tests.answer_items import TestContext
from lachesis.inference_tests.results import collect_inference_counts, measure_groups, read_samples
from lachesis.inference_tests.store import InferenceRequest, InferenceTestStore
from lachesis.inference_tests.verdict import judge_learnability
from lachesis.runs.environment_counters import read_counts
from lachesis.supervision.running_services import ServiceGroup
from lachesis.tiny_model import build as tiny_model_build
from tests.harness.openai_endpoint import serving

pytestmark = pytest.mark.timeout(400)
SUMS = Path(__file__).resolve().parents[1] / "environments" / "sums.py"
Make = Callable[..., TestContext]


@pytest.fixture(scope="module")
def endpoint():
    with serving() as server:
        yield server


@pytest.fixture
def make(random_model, endpoint, tmp_path, monkeypatch):
    """A test of the sums with that fault, on the random model's tokenizer."""
    monkeypatch.setenv("OPENAI_BASE_URL", endpoint.url)
    monkeypatch.setenv("OPENAI_API_KEY", endpoint.key)

    def bench(kind="sound", model="right", file=SUMS, class_name="Sums", steps=4):
        config = run_config.resolve_run_config(
            "sums", "embedded", {"env": {"kind": kind}}, model=random_model
        )
        asked = InferenceRequest(
            environment="sums",
            environment_file=str(file),
            models=[model],
            spec=TestSpec(environment="sums", steps=steps, group_size=8),
        )
        tests = InferenceTestStore(tmp_path / kind.replace(" ", "-") / model)
        test = tests.create(asked, config.to_yaml(), class_name=class_name)
        return TestContext(
            tests, test, config, os.open(tests.dir(test.test_id) / ".alive", os.O_CREAT | os.O_RDWR)
        )

    return bench


def stages(bench, timeouts_s):
    """The detail of each stage; raises for the one that fails."""
    with ServiceGroup() as group:
        folder = bench.tests.dir(bench.test.test_id)
        child = StageChild(
            group, bench.test.request.environment_file, bench.test.class_name, bench.config, folder
        )
        return {
            name: child.wait_for_stage(name, timeouts_s.get(name, 60.0))["detail"]
            for name in STAGE_NAMES
        }


def ask(bench):
    """What the model's test has counted, and its error."""
    (model,) = bench.test.request.models
    error = None
    try:
        answer_items._answer_items_once(bench, model, "run")
    except LachesisError as problem:
        error = problem
    output = bench.tests.get_output_file(bench.test, model)
    return collect_inference_counts(
        output, read_counts(bench.tests.get_counters_file(bench.test, model))
    ), error


def at_once(benches, do):
    with ThreadPoolExecutor(len(benches)) as pool:
        return dict(zip(benches, pool.map(do, benches.values()), strict=True))


def judge(counts_and_errors):
    """Judge what each test has counted."""
    return {
        name: judge_learnability(counts, error=error and str(error))
        for name, (counts, error) in counts_and_errors.items()
    }


def test_verdicts_of_prepared_environments(make):
    """One that can be learned, one too hard, faults of the environment itself: each by its word and
    evidence.
    """
    benches = {
        "learnable": make(model="sometimes"),
        "too hard": make(model="never"),
        "nan": make("nan"),
        "raises": make("raises", model="sometimes"),
    }
    counts_and_errors = at_once(benches, ask)
    verdicts = judge(counts_and_errors)
    assert verdicts["learnable"].word == "learnable"
    assert verdicts["learnable"].zero_signal_share == 0
    assert verdicts["learnable"].reward_mean == 0.5
    assert verdicts["too hard"].word == "too hard"
    assert verdicts["too hard"].truncation_rate == 1.0
    assert "truncated at the token limit" in " ".join(verdicts["too hard"].evidence)
    assert verdicts["nan"].word == "broken"
    assert "a score is nan" in " ".join(verdicts["nan"].evidence)
    assert verdicts["raises"].word == "broken"
    assert verdicts["raises"].invalid_rate == 0.5
    assert "cannot be read" in verdicts["raises"].evidence[0]
    learnt = benches["learnable"]
    place = (learnt.test, "sometimes")
    took = measure_groups(
        learnt.tests.get_output_file(*place), read_counts(learnt.tests.get_counters_file(*place))
    )
    assert [
        (one.rollouts, one.prefill, one.sampled, one.completions_per_prompt) for one in took
    ] == [(8, 5, 16, 8.0)] * 4
    first = read_samples(learnt.tests.get_samples_file(*place))[0]
    assert (first["prompt"], set(zip(first["responses"], first["scores"], strict=True))) == (
        "1+1=",
        {("2", 1.0), ("3", 0.0)},
    )


@pytest.mark.long
def test_verdicts_of_further_environments(make: Make) -> None:
    """One too easy, one whose verifier hears nothing, and two that give fewer groups than asked."""
    benches = {
        "too easy": make(model="right"),
        "deaf": make("deaf verifier"),
        "short": make("short"),
        "leaves out": make("leaves out", model="sometimes", steps=12),
    }
    counts_and_errors = at_once(benches, ask)
    verdicts = judge(counts_and_errors)
    assert verdicts["too easy"].word == "too easy"
    assert verdicts["deaf"].word == "broken"
    assert "all 32 rollouts got the score 0.5" in verdicts["deaf"].evidence[0]
    assert (verdicts["short"].groups, counts_and_errors["short"][1]) == (2, None)
    assert (verdicts["leaves out"].word, counts_and_errors["leaves out"][1]) == ("learnable", None)
    assert verdicts["leaves out"].zero_signal_share == 0.6667, (
        "8 of 12 groups were left out, which is no fault"
    )


def test_an_endpoint_that_fails_is_named_and_its_key_is_nowhere(
    make, endpoint, monkeypatch, tmp_path
):
    """A refused key, too many requests, an answer cut in the middle, one that never comes."""
    monkeypatch.setattr(answer_items, "RETRY_PAUSES_S", (0.1, 0.1))
    found = at_once(
        {model: make(model=model, steps=1) for model in ("status-401", "status-429", "cut")}, ask
    )
    monkeypatch.setattr(answer_items, "MODEL_TIMEOUT_S", 8.0)
    found["slow"] = ask(make(model="slow", steps=1))
    for model in ("status-429", "cut"):  # asking again may help
        assert isinstance(found[model][1], ServerDownError), found[model][1]
        assert f"the endpoint of {model} could not be used" in str(found[model][1])
    assert not isinstance(found["status-401"][1], ServerDownError)
    assert "AuthenticationError" in str(found["status-401"][1])
    assert isinstance(found["slow"][1], HealthTimeoutError)
    assert endpoint.keys == {f"Bearer {endpoint.key}"}
    held = [
        file
        for file in tmp_path.rglob("*")
        if file.is_file() and endpoint.key.encode() in file.read_bytes()
    ]
    assert held == []
    assert all(endpoint.key not in str(error) for _, error in found.values())


def test_stages_fail_by_their_names(make):
    crash = make("crash", file=SUMS.with_name("crash.py"), class_name="Crash")
    benches = {"sound": make(), "never returns": make("never returns"), "crash": crash}

    def tried(bench):
        try:
            return stages(bench, {"dataset": 3.0})
        except StageError as error:
            return error

    found = at_once(benches, tried)
    free = found["sound"]["model-free check"]
    assert free["gold_right"] == free["corrupt_wrong"] == 16
    wrong = {
        name: error.details["stage"]
        for name, error in found.items()
        if isinstance(error, StageError)
    }
    assert wrong == {"never returns": "dataset", "crash": "import"}
    assert "not done after 3 s" in str(found["never returns"])
    assert "RuntimeError at crash.py:12: no data set here" in str(found["crash"])


SLURM = """

class Slurm(Sums):
    name = "sums"

    def __init__(self, config, server_configs, slurm=True, testing=False):
        super().__init__(config, server_configs, slurm=True, testing=testing)


if __name__ == "__main__":
    Slurm.cli()
"""


def test_an_environment_for_slurm_is_checked_and_tested_as_it_is_trained(make, tmp_path):
    """Here is no Slurm, and the model is where the configuration names it."""
    file = tmp_path / "slurm_sums.py"
    file.write_text(SUMS.read_text().partition("if __name__")[0] + SLURM)
    bench = make(file=file, class_name="Slurm")
    assert stages(bench, {})["dataset"]["items"] == 16
    counted, error = ask(bench)
    assert (len(counted.scores_P), error) == (4, None)


def test_a_stage_that_prints_without_end_fails_by_its_name(make, tmp_path):
    file = tmp_path / "loud_sums.py"
    file.write_text(
        SUMS.read_text().replace(
            "time.sleep(600)", "while True:\n                print('x' * 60_000)"
        )
    )
    with pytest.raises(
        StageError, match=r"it printed more than 50 MB and was killed, see .*check\.log"
    ) as failed:
        stages(make("never returns", file=file), {})
    assert failed.value.details["stage"] == "dataset"


def test_a_missing_model_is_built_before_anything_is_judged(make, monkeypatch):
    """The environment's tokenizer is that of the model, also when an endpoint answers; without it
    all would seem broken.
    """
    bench = make()
    built: list[Path] = []
    monkeypatch.setattr(run_test, "build_tiny_model", lambda home, folder: built.append(home))
    run_test.build_missing_model(bench, lambda name, work: work())
    assert not built
    tiny = tiny_model_build.get_tiny_model_path(
        tiny_model_build.TinyModelRecipe(), bench.tests.home
    )
    config = run_config.resolve_run_config("sums", "embedded", {}, model=str(tiny))
    run_test.build_missing_model(replace(bench, config=config), lambda name, work: work())
    assert built == [bench.tests.home]


def test_a_test_that_is_suspended_in_prefect_ends(make, monkeypatch):
    """Prefect's next task says so; there is no checkpoint to go on from."""

    def suspended(*_):
        raise Pause("paused")

    bench = make()
    monkeypatch.setattr(run_test, "build_missing_model", suspended)
    monkeypatch.setattr("os.setpgid", lambda *_: None)
    monkeypatch.setenv("LACHESIS_HOME", str(bench.tests.home))
    state = inference_test.fn(test_id=bench.test.test_id)
    assert state is not None
    assert state.type == "CANCELLED"
    test = bench.tests.load(bench.test.test_id)
    assert (test.status, test.error) == (
        "failed",
        "it was suspended in Prefect, which ends a test; start it again",
    )
    os.close(bench.lock_fd)


def test_models_answer_at_once_and_each_has_its_own_time(make, monkeypatch):
    """They are awaited one after another."""
    context = make()
    test = context.test.model_copy(
        update={"request": context.test.request.model_copy(update={"models": ["slow", "fast"]})}
    )
    seconds = {"slow": 1.0, "fast": 0.1}
    monkeypatch.setattr(
        run_test, "answer_items", lambda context, model, _: time.sleep(seconds[model])
    )
    run = run_test._TestRun(replace(context, test=test), lambda name, work: work())
    monkeypatch.setattr(run, "_judge_answers", lambda *_: {})
    begun = time.monotonic()
    run._test_models({})
    assert time.monotonic() - begun < 1.8
    took = {stage.name: stage.seconds for stage in run.test.stages}
    assert took["inference slow"] >= 1.0
    assert took["inference fast"] < 0.9


def test_an_endpoint_that_is_away_for_a_moment_is_called_again(make, monkeypatch):
    calls: list[str] = []

    def answer(context, model, wandb_run):
        calls.append(model)
        if len(calls) < 3:
            raise ServerDownError("it is away")

    monkeypatch.setattr(answer_items, "RETRY_PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(answer_items, "_answer_items_once", answer)
    answer_items.answer_items(make(), "right", "run")
    assert len(calls) == 3


def test_a_test_that_is_interrupted_ends_its_processes(make, monkeypatch):
    """A signal reaches the main thread alone, while a model still answers."""
    context = make()
    os.close(context.lock_fd)
    closed = threading.Event()
    monkeypatch.setattr(TestContext, "close_groups", lambda _: closed.set())
    monkeypatch.setattr(run_test, "answer_items", lambda *_: closed.wait(60))

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_test, "_Answers", interrupt)
    monkeypatch.setattr(run_test._TestRun, "_run_model_free_stages", lambda _: ({}, None))
    threading.Timer(0.5, closed.set).start()
    with pytest.raises(KeyboardInterrupt):
        run_test.run_test(context.tests, context.test.test_id)
    test = context.tests.load(context.test.test_id)
    assert (test.status, test.error) == ("failed", "KeyboardInterrupt: ")
