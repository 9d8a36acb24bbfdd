"""TuFT over the bridge, as far as its mode without a card goes: its answers are canned.

It pins vLLM and PyTorch with CUDA, so it is installed without what it depends on, and beside it
what this mode needs.
"""

import json
import subprocess
import sys

import pytest

from lachesis.supervision.services.ports import reserve_free_ports
from lachesis.tinker_conformance.session import open_backend_session
from lachesis.tinker_conformance.weight_probes import PROBES, describe_verdict
from tests.backends.conftest import BACKENDS_HOME
from tests.harness.processes import TOKEN, run_program, run_tinker_server

pytestmark = [pytest.mark.backends, pytest.mark.timeout(1200)]
FOLDER = BACKENDS_HOME / "tuft"
TORCH = "torch==2.13.0"
PACKAGES = (
    "accelerate", "fastapi<0.137,>=0.133", "nvidia-ml-py", "omegaconf",
    "opentelemetry-exporter-otlp", "opentelemetry-instrumentation-fastapi",
    "opentelemetry-instrumentation-logging", "opentelemetry-sdk", "peft==0.20.0", "psutil",
    "ray>=2.50", "tinker<0.26,>=0.25", "transformers<6,>=5.5.3", "typer", "uvicorn[standard]",
)  # fmt: skip
# What is canned: the losses, and samples that always are the same counted tokens.
CANNED = {"sampler", "policy loss", "clipping", "seeds", "stop tokens"}
UNKNOWN = {"base beside adapter", "snapshots", "gradient", "end tokens"}


@pytest.fixture(scope="module")
def tuft():
    """TuFT's command, in an environment of its own."""
    command = FOLDER / "bin" / "tuft"
    if not command.exists():
        pip = [str(FOLDER / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        for words in (
            [sys.executable, "-m", "venv", str(FOLDER)],
            [*pip, TORCH, *PACKAGES],
            [*pip, "--no-deps", "tuft==0.2.2"],
        ):
            subprocess.run(words, check=True, timeout=1000)
    return command


@pytest.fixture
def bridge_url(tuft, random_model, tmp_path):
    """The address of a bridge before TuFT."""
    config = tmp_path / "tuft.yaml"
    model = {
        "model_name": random_model,
        "model_path": random_model,
        "max_model_len": 512,
        "max_lora_rank": 32,
        "lora_alpha_ratio": 1,
    }
    settings = {
        "checkpoint_dir": str(tmp_path / "checkpoints"),
        "supported_models": [model],
        "authorized_users": {TOKEN: "tests"},
    }
    config.write_text(json.dumps(settings))
    port = reserve_free_ports(1)[0]
    command = [str(tuft), "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--config", str(config)]
    url, log = f"http://127.0.0.1:{port}", tmp_path / "tuft.log"
    ready = f"{url}/api/v1/healthz"
    with run_program(command, log, ready, timeout_s=120, TUFT_CPU_TEST="1"):
        words = ("lachesis.skyrl_bridge", tmp_path / "bridge.log", [random_model])
        with run_tinker_server(*words, tmp_path / "store", "--upstream", url) as (_, bridge_url):
            yield bridge_url


def test_every_operation_works_and_canned_answers_are_found_out(
    bridge_url, random_model, monkeypatch
):
    monkeypatch.setenv("TINKER_BASE_URL", bridge_url)
    monkeypatch.setenv("TINKER_API_KEY", TOKEN)
    with open_backend_session(random_model) as session:
        findings = {probe.name: probe.run(session) for probe in PROBES}
    for name, finding in findings.items():
        print(f"{name}: {finding.outcome}: {finding.text}")
    outcomes = {name: finding.outcome for name, finding in findings.items()}
    assert "fails" not in outcomes.values()
    assert {name for name, outcome in outcomes.items() if outcome == "differs"} == CANNED
    assert {name for name, outcome in outcomes.items() if outcome == "not determined"} == UNKNOWN
    assert describe_verdict(findings) == "does not fit: sampler, policy loss, stop tokens"
