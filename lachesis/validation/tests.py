"""Inference tests on disk: a model answers a few items of an environment, and the environment
scores the answers.

inference_tests/{test_id}/test.json  config.yaml  stages.jsonl  test_{env}_{model}.jsonl  test_{env}_{model}.log
    and beside them per model  .tally.json (what was counted)  .samples.jsonl (what was said)

A score above 0 is correct. A step is one group; it succeeds with at least one correct completion.
Accuracies have three digits.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lachesis.base import paths
from lachesis.base.errors import StorageError, UnknownTestError
from lachesis.base.files import storage_errors, write_private
from lachesis.base.json_lines import read_json_lines
from lachesis.base.numbers import is_score
from lachesis.config.run_config import RunConfig, dump_yaml
from lachesis.runs.held_out import compute_interval
from lachesis.runs.store import RunDir, now_iso
from lachesis.validation.forecast import Forecast, GroupUsage, PlannedRun
from lachesis.validation.verdict import InferenceCounts, Verdict
from lachesis.validation.verdict import choose_best_word as best_word

Json = dict[str, Any]
EMBEDDED = "embedded:"
DEFAULT_MODELS = (
    ("qwen/qwen3-8b", "Qwen3 8B", "small"),
    ("z-ai/glm-4.7-flash", "GLM-4.7 Flash", "medium"),
    ("minimax/minimax-m2.5", "MiniMax M2.5", "large"),
)


class TestOptions(BaseModel):
    """What may be chosen of a test. Without `models` the launch's own is tested, or at a paid
    profile the default three.
    """

    __test__ = False  # no test class of pytest

    num_steps: int = 3
    group_size: int = 16
    models: list[str] | None = None
    prompts: list[str] | None = None
    max_tokens: int | None = None
    temperature: float | None = None


class InferenceRequest(TestOptions):
    """What is asked of which models. `embedded:NAME_OR_FOLDER` is served on this machine, any other
    name by the endpoint.
    """

    environment: str
    environment_file: str
    models: list[str]


class Stage(BaseModel):
    """One step of a test and how it ended."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    name: str
    """import, config, dataset, model-free check, or inference and scoring with the model's name."""
    status: Literal["running", "passed", "failed", "not offered"]
    seconds: float = 0.0
    message: str | None = None


class InferenceTest(BaseModel):
    """One test; `result` is the contract's answer once it has ended."""

    test_id: str
    request: InferenceRequest
    class_name: str = ""
    fingerprint: str = ""
    """Of the environment's code as it was tested."""
    own_values: Json = {}
    """The values of the environment's own fields, which are part of what was tested."""
    planned: PlannedRun | None = None
    """The run that this test was made for."""
    stages: list[Stage] = []
    status: Literal["pending", "running", "completed", "failed"] = "pending"
    error: str | None = None
    created_at: str = Field(default_factory=now_iso)
    ended_at: str | None = None
    result: Json | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ("completed", "failed")

    @property
    def verdict(self) -> str | None:
        """The word for the environment as a whole; None before the end, and with prompts of
        somebody's own.
        """
        summary = (self.result or {}).get("summary")
        word = summary.get("verdict") if isinstance(summary, dict) else None
        return word if isinstance(word, str) else None


OUTPUT_SUFFIXES = (
    ".jsonl",
    ".html",
    ".json",
    ".log",
    ".proxy.log",
    ".yaml",
    ".tally.json",
    ".samples.jsonl",
)


class InferenceTestStore:
    """All tests under one home."""

    def __init__(self, home: Path | None = None) -> None:
        self.home = home or paths.home()
        self.root = self.home / "inference_tests"

    def dir(self, test_id: str) -> Path:
        return self.root / test_id

    def create(self, request: InferenceRequest, config_yaml: str, **fields: Any) -> InferenceTest:
        """Raises StorageError."""
        record = InferenceTest(test_id=secrets.token_hex(4), request=request, **fields)
        with storage_errors(self.root):
            self.dir(record.test_id).mkdir(parents=True, mode=0o700)
        write_private(self.dir(record.test_id) / "config.yaml", config_yaml)
        self.save(record)
        return record

    def discard(self, test_id: str) -> None:
        """Remove a test that was never submitted."""
        shutil.rmtree(self.dir(test_id), ignore_errors=True)

    def save_flow_run_id(self, test_id: str, flow_run_id: str) -> None:
        """Beside the record, which belongs to the flow from here on."""
        write_private(self.dir(test_id) / "flow_run_id", flow_run_id)

    def read_flow_run_id(self, test_id: str) -> str | None:
        try:
            return (self.dir(test_id) / "flow_run_id").read_text()
        except OSError:
            return None

    def save(self, record: InferenceTest) -> None:
        write_private(self.dir(record.test_id) / "test.json", record.model_dump_json(indent=2))

    def load(self, test_id: str) -> InferenceTest:
        """Raises UnknownTestError, or StorageError for a damaged record."""
        file = self.dir(test_id) / "test.json"
        if not re.fullmatch(r"[0-9a-f]{8}", test_id) or not file.is_file():
            test_ids = sorted(path.parent.name for path in self.root.glob("*/test.json"))
            raise UnknownTestError(
                f"there is no inference test {test_id[:40]!r}; known: {', '.join(test_ids[:10]) or 'none'}",
                available=test_ids,
            )
        with storage_errors(file):
            try:
                return InferenceTest.model_validate_json(file.read_bytes())
            except ValidationError as error:
                raise StorageError(f"{file} is damaged ({error.errors()[0]['msg']})") from error

    def all(self) -> list[InferenceTest]:
        """Every readable test, the newest first."""
        tests = []
        for file in self.root.glob("*/test.json"):
            with contextlib.suppress(OSError, ValidationError):
                tests.append(InferenceTest.model_validate_json(file.read_bytes()))
        return sorted(tests, key=lambda test: test.created_at, reverse=True)

    def load_and_fail_if_dead(self, test_id: str) -> InferenceTest:
        """The test; ended as failed when its flow is gone, which the file that a living one holds
        tells.
        """
        test = self.load(test_id)
        if test.status == "running" and not self.get_run_dir(test_id).is_alive():
            return self.fail(
                test_id, "its flow is gone: the runner or the machine was stopped; start it again"
            )
        return test

    def get_run_dir(self, test_id: str) -> RunDir:
        """Held while the test's flow or one of its processes lives."""
        return RunDir(self.root, test_id)

    def fail(self, test_id: str, reason: str) -> InferenceTest:
        """The test, ended with this reason if it has not ended meanwhile."""
        fresh = self.load(test_id)
        if fresh.has_ended:
            return fresh
        failed = fresh.model_copy(
            update={"status": "failed", "error": reason, "ended_at": now_iso()}
        )
        self.save(failed)
        return failed

    def get_output_file(self, record: InferenceTest, model: str) -> Path:
        """Where this model's groups go; its other files lie beside it. A model that would have the
        file of an earlier one has its number in the name.
        """
        model_names = [
            re.sub(r"[^A-Za-z0-9._-]", "_", _shorten_model_name(model_name))
            for model_name in record.request.models
        ]
        index = record.request.models.index(model)
        name_suffix = f"-{index + 1}" if model_names[index] in model_names[:index] else ""
        return (
            self.dir(record.test_id)
            / f"test_{record.request.environment}_{model_names[index]}{name_suffix}.jsonl"
        )

    def get_output_files(self, record: InferenceTest, model: str) -> list[Path]:
        """Every file that a test of this model writes."""
        output = self.get_output_file(record, model)
        stems = (
            [output, _get_environment_groups_file(output)] if record.request.prompts else [output]
        )
        return [stem.with_suffix(suffix) for stem in stems for suffix in OUTPUT_SUFFIXES]

    def get_counters_file(self, record: InferenceTest, model: str) -> Path:
        return self.get_output_file(record, model).with_suffix(".tally.json")

    def get_samples_file(self, record: InferenceTest, model: str) -> Path:
        return self.get_output_file(record, model).with_suffix(".samples.jsonl")

    def count_finished_groups(self, record: InferenceTest) -> int:
        """Groups that all models have answered until now."""
        return sum(
            len(_read_groups(self.get_output_file(record, model)))
            for model in record.request.models
        )


def make_model_result(
    output: Path, model: str, wandb_run: str, *, error: str | None, prompts: bool, verdict: Verdict | None = None,
    forecast: Forecast | None = None,
) -> Json:  # fmt: skip
    """What one model's file says, in the keys of the contract, with the verdict and the forecast
    beside them.
    """
    lines = _read_groups(output)
    model_labels = {name: (title, scale) for name, title, scale in DEFAULT_MODELS}
    title, scale = model_labels.get(
        model, (_shorten_model_name(model), "embedded" if model.startswith(EMBEDDED) else "custom")
    )
    steps = [
        _make_step(index, [float(score) for score in line["scores"] if is_score(score)])
        for index, line in enumerate(lines, 1)
    ]
    num_completions, num_correct = (
        sum(step["completions"] for step in steps),
        sum(step["correct"] for step in steps),
    )
    num_successful_steps = sum(step["correct"] > 0 for step in steps)
    result: Json = {
        "model": model,
        "name": title,
        "scale": scale,
        "wandb_run": wandb_run,
        "output_file": str(output),
        "log_file": str(output.with_suffix(".log")),
        "steps": steps,
        "steps_tested": len(steps),
        "total_completions": num_completions,
        "correct_completions": num_correct,
        "accuracy": round(num_correct / num_completions, 3) if num_completions else 0.0,
        "steps_with_correct": num_successful_steps,
        "step_success_rate": round(num_successful_steps / len(steps), 3) if steps else 0.0,
        "accuracy_interval": _make_group_interval(
            sum(step["correct"] / step["completions"] for step in steps if step["completions"]),
            steps,
        ),
        "step_success_interval": _make_group_interval(num_successful_steps, steps),
    }
    if prompts:
        result["prompts"] = [_make_answered_prompt(line) for line in lines]
    reports = {"verdict": verdict, "forecast": forecast}
    result |= {
        key: report.model_dump(mode="json") for key, report in reports.items() if report is not None
    }
    return {**result, **({"error": error} if error else {})}


def collect_inference_counts(output: Path, environment_counts: Json | None) -> InferenceCounts:
    """What one model's test has counted."""
    counts = environment_counts or {}
    scores = [
        [float(score) for score in line["scores"] if is_score(score)]
        for line in _read_groups(output)
    ]
    return InferenceCounts(
        scores_P=scores,
        empty=int(counts.get("empty", 0)),
        invalid=int(counts.get("invalid", 0)),
        completions=int(counts.get("completions", 0)),
        truncated=int(counts.get("truncated", 0)),
        errors=counts.get("errors") or {},
    )


def measure_groups(output: Path, environment_counts: Json | None) -> list[GroupUsage]:
    """What each group took, for a forecast."""
    scores = [line["scores"] for line in _read_groups(output)]
    usages = []
    for index, group_counts in enumerate((environment_counts or {}).get("per_group") or []):
        has_signal = index < len(scores) and len(set(scores[index])) > 1
        completions_per_prompt = max(
            1.0, group_counts["completions"] / max(1, group_counts["requests"])
        )
        numbers = {
            "prefill": group_counts["prompt_tokens"],
            "sampled": group_counts["sampled_tokens"],
            "seconds": group_counts["seconds"],
        }
        usages.append(
            GroupUsage(
                rollouts=int(group_counts["rollouts"]),
                completions_per_prompt=completions_per_prompt,
                has_signal=has_signal,
                **numbers,
            )
        )
    return usages


def read_samples(file: Path) -> list[Json]:
    """What was asked and said in the first groups: `prompt`, `responses`, `scores`."""
    return [group for group in _read_groups(file) if isinstance(group.get("responses"), list)]


def make_test_result(record: InferenceTest, models: list[Json], folder: Path) -> Json:
    """The contract's answer for all models."""
    request = record.request
    succeeded = [result for result in models if result["steps_tested"] and "error" not in result]
    best_result = max(succeeded, key=lambda result: result["accuracy"], default=None)
    per_model = request.num_steps * request.group_size
    words = [result["verdict"]["word"] for result in models if "verdict" in result]
    forecast = (best_result or {}).get("forecast")
    verdict_entry = {"verdict": best_word(words)} if words else {}
    return {
        "environment": request.environment,
        "environment_file": request.environment_file,
        "test_config": {
            "num_steps": request.num_steps,
            "group_size": request.group_size,
            "rollouts_per_model": per_model,
            "total_rollouts": per_model * len(request.models),
        },
        "models_tested": models,
        "summary": {
            "steps_requested": request.num_steps,
            "models_tested": len(models),
            "models_succeeded": len(succeeded),
            "best_model": best_result["model"] if best_result else None,
            "avg_accuracy": round(
                sum(result["accuracy"] for result in succeeded) / len(succeeded), 3
            )
            if succeeded
            else 0.0,
            "environment_working": bool(succeeded),
            "output_directory": str(folder),
            **verdict_entry,
            **({"forecast": forecast} if forecast else {}),
        },
    }


def _shorten_model_name(model: str) -> str:
    """The model's name; of a folder its last part."""
    name = model.removeprefix(EMBEDDED)
    return Path(name).name if Path(name).is_absolute() else name


def _make_step(number: int, scores: list[float]) -> Json:
    return {
        "step": number,
        "completions": len(scores),
        "correct": sum(score > 0 for score in scores),
        "scores": scores,
    }


def _make_group_interval(successes: float, steps: list[Json]) -> Json | None:
    """Return the 95 % interval of a share over the groups that have answers, or None without any.

    Answers to one item are not independent, so the number of groups counts.
    """
    answered = [step for step in steps if step["completions"]]
    return compute_interval(successes / len(answered), len(answered)) if answered else None


def _make_answered_prompt(line: Json) -> Json:
    responses = [
        {"text": text, "score": score}
        for text, score in zip(line["responses"], line["scores"], strict=True)
    ]
    return {
        "prompt": line["prompt"],
        "responses": responses,
        **({"note": line["note"]} if line.get("note") else {}),
    }


def _read_groups(output: Path) -> list[Json]:
    """The whole groups of a file that may still be written."""
    return [group for group in read_json_lines(output) if isinstance(group.get("scores"), list)]


def _get_environment_groups_file(output: Path) -> Path:
    """Where the environment's own groups go while somebody's prompts are answered: `output` is for
    the answers to these.
    """
    return output.with_name(f"groups_{output.name}")


def make_process_config(
    config: RunConfig,
    request: InferenceRequest,
    output: Path,
    endpoint: Json,
    wandb_run: str,
    *,
    use_wandb: bool = False,
) -> str:
    """Return the YAML of the environment's `process` command for one model. `endpoint` holds the
    fields of Atropos' server section. With `use_wandb` the environment logs to W&B, which is
    offline in a test.
    """
    content = yaml.safe_load(config.to_yaml())
    groups = _get_environment_groups_file(output) if request.prompts else output
    content["env"].update(
        total_steps=request.num_steps,
        group_size=request.group_size,
        use_wandb=use_wandb,
        wandb_name=wandb_run,
        data_path_to_save_groups=str(groups),
        include_messages=True,
        ensure_scores_are_not_same=False,
        steps_per_eval=0,
    )
    content["openai"] = [endpoint, dict(endpoint)]
    return dump_yaml(content)


def make_remote_server_section(model: str, base_url: str) -> Json:
    """Return the server section for a model that answers at this address by OpenAI's protocol."""
    return {
        "model_name": model,
        "base_url": base_url,
        "api_key": "x",  # the environment's process puts its token here
        "server_type": "openai",
        "health_check": False,
        "timeout": 600,
        "num_max_requests_at_once": 64,
        "num_requests_for_eval": 64,
    }
