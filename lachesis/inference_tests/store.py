"""Store inference tests: a model answers a few items of an environment, which scores the answers.

    inference_tests/{test_id}/test.json  config.yaml  stages.jsonl
        test_{env}_{model}.jsonl  .log  .counters.json (counts)  .samples.jsonl (texts)

A score above 0 is correct. A step is one group; it succeeds with at least one correct completion.
Accuracies have three digits.
"""

import contextlib
import re
import secrets
import shutil
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lachesis.base import paths
from lachesis.base.errors import StorageError, UnknownTestError
from lachesis.base.files import storage_errors, write_private
from lachesis.base.json_text import Json, read_json_lines
from lachesis.base.timestamps import now_iso
from lachesis.config.launch_spec import TestSpec
from lachesis.inference_tests.forecast import PlannedRun
from lachesis.runs.folder import RunDir

# Where a model of a test is sampled: on this machine, or at the Tinker server that the environment
# variables name. Any other model is a name at an endpoint.
EMBEDDED, TINKER = "embedded:", "tinker:"
DEFAULT_MODELS = (
    ("qwen/qwen3-8b", "Qwen3 8B", "small"),
    ("z-ai/glm-4.7-flash", "GLM-4.7 Flash", "medium"),
    ("minimax/minimax-m2.5", "MiniMax M2.5", "large"),
)


class InferenceRequest(BaseModel):
    """Hold the request for a test, with the environment and the models that were found for it."""

    environment: str
    """The name of the environment."""
    environment_file: str
    models: list[str]
    """`embedded:NAME_OR_FOLDER` is served on this machine, `tinker:NAME` by the Tinker server, and
    any other name by the endpoint."""
    spec: TestSpec


class Stage(BaseModel):
    """Hold one stage of a test and how it ended."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    name: str
    """The stage: import, config, dataset, model-free check, or inference and scoring with the
    model's name."""
    status: Literal["running", "passed", "warned", "failed", "not offered"]
    seconds: float = 0.0
    message: str | None = None


class InferenceTest(BaseModel):
    """Hold one test and, once it has ended, its `result`."""

    test_id: str
    request: InferenceRequest
    class_name: str = ""
    fingerprint: str = ""
    """Hash of the environment's code when it was tested."""
    own_values: Json = {}
    """The values of the environment's own fields in the test."""
    planned: PlannedRun | None = None
    """The run that this test is for."""
    max_token_length: int | None = None
    """Maximum number of tokens of a rollout in the test."""
    prompt_settings: Json = {}
    """What decides how conversations become tokens, and where an answer ends."""
    max_cost_usd: float | None = None
    """The most that it can cost in US dollars; None if it is free or no price is known."""
    chat_templates: dict[str, str] = {}
    """Digest of the chat template of each model that has one on this machine."""
    stages: list[Stage] = []
    status: Literal["pending", "running", "completed", "failed"] = "pending"
    error: str | None = None
    created_at: str = Field(default_factory=now_iso)
    ended_at: str | None = None
    result: Json | None = None

    @property
    def submission_key(self) -> str:
        """Return the key of the test's flow run."""
        return f"test-{self.test_id}"

    @property
    def cost_usd(self) -> float:
        """Return the cost of the test in US dollars; before its end, the most that it can cost."""
        summary = (self.result or {}).get("summary") or {}
        cost = summary.get("cost_usd")
        return float(self.max_cost_usd or 0.0) if cost is None else float(cost)

    @property
    def has_ended(self) -> bool:
        """Return whether the test has completed or failed."""
        return self.status in ("completed", "failed")

    @property
    def verdict(self) -> str | None:
        """Return the verdict on the environment; None before the end and for own prompts."""
        summary = (self.result or {}).get("summary")
        word = summary.get("verdict") if isinstance(summary, dict) else None
        if isinstance(word, str):
            return word
        return None


OUTPUT_SUFFIXES = (".jsonl", ".html", ".json", ".log", ".yaml", ".counters.json", ".samples.jsonl")


class InferenceTestStore:
    """Manage all tests of one home, or its checks of environments in a folder of their own."""

    def __init__(self, home: Path | None = None, folder: str = "inference_tests") -> None:
        self.home = home or paths.home()
        self.root = self.home / folder

    def dir(self, test_id: str) -> Path:
        """Return the folder of a test."""
        return self.root / test_id

    def create(
        self, request: InferenceRequest, config_yaml: str, **fields: object
    ) -> InferenceTest:
        """Create the record and the folder of a new test.

        Raises:
            StorageError: The disk refused a write.
        """
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
        """Store the flow run's id beside the record, which only the flow writes from now on."""
        write_private(self.dir(test_id) / "flow_run_id", flow_run_id)

    def read_flow_run_id(self, test_id: str) -> str | None:
        """Return the id of the test's flow run, if it was submitted."""
        try:
            return (self.dir(test_id) / "flow_run_id").read_text()
        except OSError:
            return None

    def save(self, record: InferenceTest) -> None:
        """Replace the record of a test."""
        write_private(self.dir(record.test_id) / "test.json", record.model_dump_json(indent=2))

    def load(self, test_id: str) -> InferenceTest:
        """Return the record of a test.

        Raises:
            UnknownTestError: There is no such test.
            StorageError: Its record is damaged.
        """
        file = self.dir(test_id) / "test.json"
        if not re.fullmatch(r"[0-9a-f]{8}", test_id) or not file.is_file():
            test_ids = sorted(path.parent.name for path in self.root.glob("*/test.json"))
            raise UnknownTestError(
                f"there is no inference test {test_id[:40]!r}; existing tests: "
                f"{', '.join(test_ids[:10]) or 'none'}",
                available=test_ids,
            )
        with storage_errors(file):
            try:
                return InferenceTest.model_validate_json(file.read_bytes())
            except ValidationError as error:
                raise StorageError(f"{file} is damaged ({error.errors()[0]['msg']})") from error

    def all(self) -> list[InferenceTest]:
        """Return every readable test, the newest first."""
        tests = []
        for file in self.root.glob("*/test.json"):
            with contextlib.suppress(OSError, ValidationError):
                tests.append(InferenceTest.model_validate_json(file.read_bytes()))
        return sorted(tests, key=lambda test: test.created_at, reverse=True)

    def load_and_fail_if_dead(self, test_id: str) -> InferenceTest:
        """Return the test, and mark it as failed if its flow is gone, which its lock file shows."""
        test = self.load(test_id)
        if test.status == "running" and not self.get_run_dir(test_id).is_alive():
            return self.fail(
                test_id, "its flow is gone: the runner or the machine was stopped; start it again"
            )
        return test

    def get_run_dir(self, test_id: str) -> RunDir:
        """Return the folder with the lock that is held while a process of the test is alive."""
        return RunDir(self.root, test_id)

    def fail(self, test_id: str, reason: str) -> InferenceTest:
        """Mark a test as failed unless it has ended meanwhile, and return it."""
        fresh = self.load(test_id)
        if fresh.has_ended:
            return fresh
        failed = fresh.model_copy(
            update={"status": "failed", "error": reason, "ended_at": now_iso()}
        )
        self.save(failed)
        return failed

    def get_output_file(self, record: InferenceTest, model: str) -> Path:
        """Return the file of this model's groups; its other files are in the same folder.

        A model that would have the same file as an earlier one has its number in the name.
        """
        model_names = [
            re.sub(r"[^A-Za-z0-9._-]", "_", shorten_model_name(model_name))
            for model_name in record.request.models
        ]
        index = record.request.models.index(model)
        if model_names[index] in model_names[:index]:
            name_suffix = f"-{index + 1}"
        else:
            name_suffix = ""
        return (
            self.dir(record.test_id)
            / f"test_{record.request.environment}_{model_names[index]}{name_suffix}.jsonl"
        )

    def get_output_files(self, record: InferenceTest, model: str) -> list[Path]:
        """Return every file that a test of this model writes."""
        output = self.get_output_file(record, model)
        if record.request.spec.prompts:
            stems = [output, get_environment_groups_file(output)]
        else:
            stems = [output]
        return [stem.with_suffix(suffix) for stem in stems for suffix in OUTPUT_SUFFIXES]

    def get_counters_file(self, record: InferenceTest, model: str) -> Path:
        """Return the file of the counts of this model's test."""
        return self.get_output_file(record, model).with_suffix(".counters.json")

    def get_samples_file(self, record: InferenceTest, model: str) -> Path:
        """Return the file of this model's sampled texts."""
        return self.get_output_file(record, model).with_suffix(".samples.jsonl")

    def count_finished_groups(self, record: InferenceTest) -> int:
        """Return how many groups all models have answered until now."""
        return sum(
            len(read_groups(self.get_output_file(record, model))) for model in record.request.models
        )


def make_tested_name(base_model: str, profile: str) -> str:
    """Return the name under which a test samples a model where this profile trains it."""
    if profile == "embedded":
        return f"{EMBEDDED}{base_model}"
    return f"{TINKER}{base_model}"


def get_model_name(model: str) -> str:
    """Return the name or the folder of a model, without where it is sampled."""
    return model.removeprefix(EMBEDDED).removeprefix(TINKER)


def shorten_model_name(model: str) -> str:
    """Return the model's name, or the last part of its folder."""
    name = get_model_name(model)
    if Path(name).is_absolute():
        return Path(name).name
    return name


def read_groups(output: Path) -> list[Json]:
    """Return the complete groups of a file that may still be written."""
    return [group for group in read_json_lines(output) if isinstance(group.get("scores"), list)]


def get_environment_groups_file(output: Path) -> Path:
    """Return the file of the environment's own groups in a test of a user's prompts.

    `output` holds the answers to the prompts.
    """
    return output.with_name(f"groups_{output.name}")
