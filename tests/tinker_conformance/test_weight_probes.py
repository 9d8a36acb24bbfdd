"""`lachesis backend check`: our engine fits, and servers that differ are told apart."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
import tinker

from lachesis.base.errors import ServerProtocolError
from lachesis.base.tinker_client import call_sdk
from lachesis.cli.main import main
from lachesis.tinker_conformance import weight_probes
from lachesis.tinker_conformance.session import open_backend_session
from lachesis.tinker_conformance.weight_probes import PROBES, describe_verdict
from tests.harness.processes import TOKEN, run_tinker_server
from tests.tinker_cloud.conftest import cloud, served_cloud  # noqa: F401
from tests.tinker_cloud.deviating_engine import DEVIATION_FILE

pytestmark = pytest.mark.timeout(300)
MODEL = "Qwen/Qwen3-4B-Instruct-2507"
# What cannot be answered where updates change nothing, where passes have no sum of their losses,
# and where no answer can be sampled.
EFFECT_PROBES = {
    "training", "base beside adapter", "snapshots", "old clients", "unpublished", "alpha",
    "clipping",
}  # fmt: skip
TRAINING_PROBES = {*EFFECT_PROBES, "sampler", "policy loss", "checkpoint"}
SAMPLING_PROBES = {
    "base", "fresh adapter", "sampler", "base beside adapter", "snapshots", "old clients",
    "unpublished", "seeds", "batches", "stop tokens", "end tokens",
}  # fmt: skip
PROMPT_PROBES = {
    "base", "fresh adapter", "sampler", "base beside adapter", "snapshots", "unpublished",
    "batches",
}  # fmt: skip


@pytest.fixture
def others(cloud):  # noqa: F811
    """The rehearsal cloud, which can behave as servers of other makers."""
    return cloud


def run_probes(model, names=()):
    """Run the probes of these names, or all of them."""
    with open_backend_session(model) as session:
        return {
            probe.name: probe.run(session) for probe in PROBES if not names or probe.name in names
        }


def list_different(findings):
    return {name for name, finding in findings.items() if finding.outcome != "as Tinker"}


def assert_judged(findings, different, verdict):
    """Fail unless exactly these probes differ, and the verdict begins with these words."""
    assert list_different(findings) == different, findings
    assert describe_verdict(findings).startswith(verdict), findings


def test_the_engine_fits(engine, monkeypatch):
    monkeypatch.setenv("TINKER_BASE_URL", engine.url)
    monkeypatch.setenv("TINKER_API_KEY", engine.token)
    findings = run_probes(engine.model)
    assert {name: findings[name] for name in list_different(findings)} == {}
    assert describe_verdict(findings) == "fits"


@pytest.mark.parametrize(
    ("kind", "different", "verdict"),
    [
        ("stale_sampler", {"sampler"}, "does not fit: sampler"),
        ("order_noise", {"batches"}, "fits with limits: batches"),
    ],
)
def test_a_fault_of_the_cloud_is_told_apart(others, kind, different, verdict):
    """Other probes are asked beside the one that sees it: they see nothing."""
    others.begin(kind)
    beside = {"training", "checkpoint"}
    if kind == "stale_sampler":  # It has the weights of an earlier publication, if there is one.
        beside.add("fresh adapter")
    assert_judged(run_probes(MODEL, different | beside), different, verdict)


@dataclass
class DeviatingServer:
    url: str
    store: Path

    def begin(self, deviation):
        (self.store / DEVIATION_FILE).write_text(deviation)


@pytest.fixture(scope="module")
def deviating_server(random_model, tmp_path_factory):
    """Our engine, which can be told what to do wrongly."""
    store = tmp_path_factory.mktemp("deviating")
    module, log = "tests.tinker_cloud.deviating_engine", store / "engine.log"
    with run_tinker_server(module, log, [random_model], store) as (_, url):
        yield DeviatingServer(url, store)


@pytest.fixture
def deviating(deviating_server, monkeypatch):
    """The same, as the server of this process."""
    monkeypatch.setenv("TINKER_BASE_URL", deviating_server.url)
    monkeypatch.setenv("TINKER_API_KEY", TOKEN)
    return deviating_server


each_deviation = pytest.mark.parametrize(
    ("deviation", "different", "verdict"),
    [
        ("", set(), "fits"),
        ("mean_losses", {"policy loss", "gradient"}, "does not fit: policy loss, gradient"),
        ("no_loss_sum", TRAINING_PROBES, "does not fit: training"),
        ("growing_alpha", {"alpha"}, "fits with limits: alpha"),
        ("adapter_for_base", {"base beside adapter"}, "does not fit: base beside adapter"),
        ("adapters_begin_elsewhere", {"fresh adapter"}, "does not fit: fresh adapter"),
        ("updates_without_effect", EFFECT_PROBES, "does not fit: training"),
        ("live_weights", {"snapshots", "unpublished"}, "does not fit: snapshots, unpublished"),
        ("old_clients_overwrite", {"old clients"}, "does not fit: old clients"),
        ("states_are_not_loaded", {"checkpoint"}, "does not fit: checkpoint"),
        ("answers_without_end", {"end tokens"}, "does not fit: end tokens"),
        ("no_sequence_ids", SAMPLING_PROBES, "does not fit: base"),
        ("short_logprobs", PROMPT_PROBES, "does not fit: base"),
        ("live_samplers", {"snapshots"}, "does not fit: snapshots"),
        ("no_stop_tokens", {"stop tokens"}, "does not fit: stop tokens"),
        ("no_clipping", {"clipping"}, "fits with limits: clipping"),
        ("no_seeds", {"seeds"}, "fits with limits: seeds"),
    ],
)


@each_deviation
def test_an_engine_that_differs_is_told_apart(
    deviating, random_model, deviation, different, verdict
):
    """Two probes are asked beside those that see it: they see nothing."""
    deviating.begin(deviation)
    findings = run_probes(random_model, different | {"training", "checkpoint"})
    assert_judged(findings, different, verdict)


@pytest.mark.long
@each_deviation
def test_no_other_probe_sees_it(deviating, random_model, deviation, different, verdict):
    deviating.begin(deviation)
    findings = run_probes(random_model)
    assert findings.keys() == {probe.name for probe in PROBES}
    assert_judged(findings, different, verdict)


def test_the_trainer_names_an_answer_that_the_sdk_refuses(deviating, random_model):
    deviating.begin("no_sequence_ids")
    prompt, params = tinker.ModelInput.from_ints([5, 6]), tinker.SamplingParams(max_tokens=1)
    with (
        open_backend_session(random_model) as session,
        pytest.raises(ServerProtocolError, match=r"refuses an answer .* sample_sequence_ids"),
    ):
        asyncio.run(call_sdk(session.sample_base(), "sample", prompt, 1, params))


def test_the_command_prints_a_verdict(
    deviating, random_model, answer, capsys,
    monkeypatch,
):  # fmt: skip
    names = ("training", "snapshots", "clipping")
    probes = tuple(probe for probe in PROBES if probe.name in names)
    monkeypatch.setattr(weight_probes, "PROBES", probes)
    words = ("backend", "check", deviating.url, "--model", random_model)
    deviating.begin("no_clipping")
    report = answer(*words)
    assert report["verdict"] == "fits with limits: clipping"
    assert [row["probe"] for row in report["probes"]] == list(names)
    deviating.begin("live_samplers")
    assert main([*words]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "verdict does not fit: " in text
    assert "snapshots differs: the old client moved by" in text


def test_a_model_that_is_not_offered_is_refused(others, capsys):
    assert main(["backend", "check", others.url, "--model", "no/model"]) == 1
    message = " ".join(capsys.readouterr().err.split())
    assert "does not offer no/model for training; it offers Qwen/" in message
