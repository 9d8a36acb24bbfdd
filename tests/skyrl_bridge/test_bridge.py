"""The real SDK on an engine that means something else by most words, over the bridge."""

import contextlib
import json
import time

import numpy as np
import pytest
import tinker
from safetensors.numpy import load_file

from lachesis.base.tinker_client import wait_for_sdk
from lachesis.checkpoints.download_weights import download_checkpoint
from lachesis.tinker_conformance.session import TEXT, open_backend_session
from lachesis.tinker_conformance.weight_probes import PROBES
from lachesis.tinker_server.model_description import read_bridged_model
from lachesis.trainer.sdk_data import make_datum
from tests.harness.processes import TOKEN, end

pytestmark = pytest.mark.timeout(300)
ADAM = tinker.AdamParams(learning_rate=1e-2)


@contextlib.contextmanager
def opened(url):
    client = tinker.ServiceClient(base_url=url, api_key=TOKEN)
    try:
        yield client
    finally:
        if hasattr(client, "close"):
            wait_for_sdk(client.close("success"))


def make_adapter(client, model):
    return wait_for_sdk(client.create_lora_training_client(base_model=model, rank=8, seed=1))


def make_rollouts(seed):
    """Rollouts of different lengths whose prompt has no advantage."""
    rng = np.random.default_rng(seed)
    data = []
    for length in (3, 9, 20):
        tokens = rng.integers(5, 250, length + 1)
        advantages = rng.normal(size=length).astype(np.float32)
        advantages[0] = 0.0
        data.append(
            make_datum(
                tokens[:-1],
                targets=tokens[1:],
                logprobs=rng.normal(-5.5, 0.1, length).astype(np.float32),
                advantages=advantages,
            )
        )
    return data


def make_weighted(seed):
    """Texts with weights of both signs that sum to zero, as a loss of the client's own has them."""
    rng = np.random.default_rng(seed)
    data = []
    for length in (4, 12):
        tokens = rng.integers(5, 250, length + 1)
        weights = rng.normal(size=length)
        weights -= weights.mean()
        data.append(make_datum(tokens[:-1], targets=tokens[1:], weights=weights.astype(np.float32)))
    return data


def train(client, model, losses):
    """Make two updates, each of a pass per loss, and return what can be seen of them."""
    adapter = make_adapter(client, model)
    sums, norms = [], []
    for step in range(2):
        for number, loss_fn in enumerate(losses):
            seed = 10 * step + number
            data = make_weighted(seed) if loss_fn == "cross_entropy" else make_rollouts(seed)
            output = adapter.forward_backward(data, loss_fn).result()
            sums.append(output.metrics["loss:sum"])
        metrics = adapter.optim_step(ADAM).result().metrics or {}
        norms.append(metrics["grad_norm"])
    text = make_datum(
        np.asarray(TEXT[:-1]),
        targets=np.asarray(TEXT[1:]),
        weights=np.zeros(len(TEXT) - 1, np.float32),
    )
    output = adapter.forward([text], "cross_entropy").result()
    logprobs = output.loss_fn_outputs[0]["logprobs"].to_numpy()
    return {"sums": sums, "norms": norms, "logprobs": logprobs}


@pytest.mark.parametrize(
    "losses",
    [
        ("importance_sampling",),
        ("ppo", "cispo"),
        ("cross_entropy", "importance_sampling", "cross_entropy"),
    ],
)
def test_updates_are_those_of_the_embedded_engine(bridge, engine, losses):
    """Also when several passes make one update."""
    with opened(bridge.url) as over_bridge, opened(engine.url) as direct:
        bridged = train(over_bridge, bridge.model, losses)
        expected = train(direct, engine.model, losses)
    assert bridged["sums"] == pytest.approx(expected["sums"], rel=1e-4, abs=1e-4)
    assert bridged["norms"] == pytest.approx(expected["norms"], rel=1e-3)
    assert np.abs(bridged["logprobs"] - expected["logprobs"]).max() < 2e-3


def test_all_probes_but_clipping_find_tinker(bridge, monkeypatch):
    monkeypatch.setenv("TINKER_BASE_URL", bridge.url)
    monkeypatch.setenv("TINKER_API_KEY", TOKEN)
    with open_backend_session(bridge.model) as session:
        findings = {probe.name: probe.run(session) for probe in PROBES}
    different = {name for name, found in findings.items() if found.outcome != "as Tinker"}
    assert different == {"clipping"}, findings
    assert "grad_clip_norm is 1e-12, which the engine ignores" in findings["clipping"].text


def test_what_the_engine_means_was_measured(bridge):
    report = json.loads((bridge.store / "bridge.json").read_text())
    assert report == {
        "upstream": bridge.upstream_url,
        "model": bridge.model,
        "averages_batch": True,
        "averages_tokens": True,
        "clips": False,
        "is_measured": True,
    }


def test_answers_end_at_end_tokens_and_at_stop_strings(bridge):
    prompt, tokenizer = (
        tinker.ModelInput.from_ints(TEXT),
        read_bridged_model(bridge.model).tokenizer,
    )
    with opened(bridge.url) as client:
        sampler = wait_for_sdk(client.create_sampling_client(base_model=bridge.model))
        endless = tinker.SamplingParams(max_tokens=64, stop=[], seed=5)
        whole = sampler.sample(prompt, 1, endless).result().sequences[0]
        texts = [tokenizer.decode([token]) for token in whole.tokens]
        letter = next(text for text in texts[3:] if text.isascii() and text.isalpha())
        stopped = (
            sampler.sample(prompt, 1, tinker.SamplingParams(max_tokens=64, stop=letter, seed=5))
            .result()
            .sequences[0]
        )
    assert len(whole.tokens) == 64
    assert str(whole.stop_reason) == "length"
    end_of_answer = texts.index(letter) + 1
    assert list(stopped.tokens) == list(whole.tokens)[:end_of_answer]
    assert str(stopped.stop_reason) == "stop"
    assert len(stopped.logprobs or []) == end_of_answer


def test_a_new_bridge_finds_the_checkpoints(bridge, start_bridge, tmp_path, monkeypatch):
    """State, weights for sampling, and a download that PEFT can read."""
    with opened(bridge.url) as client:
        adapter = make_adapter(client, bridge.model)
        adapter.forward_backward(make_rollouts(1), "importance_sampling").result()
        adapter.optim_step(ADAM).result()
        state = adapter.save_state("kept").result().path
        weights = adapter.save_weights_for_sampler("kept-sampler").result().path
        adapter.forward_backward(make_rollouts(2), "importance_sampling").result()
        norm = (adapter.optim_step(ADAM).result().metrics or {})["grad_norm"]
    later = start_bridge(bridge.model, bridge)
    prompt = tinker.ModelInput.from_ints(TEXT)
    with opened(later.url) as client:
        restored = wait_for_sdk(client.create_training_client_from_state_with_optimizer(state))
        sampler = wait_for_sdk(client.create_sampling_client(model_path=weights))
        own = wait_for_sdk(restored.save_weights_and_get_sampling_client())
        assert sampler.compute_logprobs(prompt).result() == pytest.approx(
            own.compute_logprobs(prompt).result(), abs=1e-4
        )
        restored.forward_backward(make_rollouts(2), "importance_sampling").result()
        assert (restored.optim_step(ADAM).result().metrics or {})["grad_norm"] == pytest.approx(
            norm, rel=1e-4
        )
    monkeypatch.setenv("TINKER_BASE_URL", later.url)
    monkeypatch.setenv("TINKER_API_KEY", TOKEN)
    download_checkpoint(state, tmp_path / "cache", tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    layers = {
        name.split(".lora_A")[0].rpartition(".")[2]
        for name in load_file(tmp_path / "adapter_model.safetensors")
        if ".lora_A" in name
    }
    assert set(config["target_modules"]) == layers
    assert "up_proj" in layers


def test_a_loss_that_the_engine_lacks_is_refused(bridge):
    with opened(bridge.url) as client:
        adapter = make_adapter(client, bridge.model)
        with pytest.raises(tinker.TinkerError, match="loss_fn 'dro' is not offered"):
            adapter.forward_backward(make_rollouts(1), "dro").result()
        # The adapter is not harmed.
        adapter.forward_backward(make_rollouts(1), "ppo").result()


def test_a_dead_engine_is_named(bridge):
    """The last test of this file, because the engine of all the others ends."""
    with opened(bridge.url) as client:
        adapter = make_adapter(client, bridge.model)
        end(bridge.upstream)
        began = time.monotonic()
        with pytest.raises(tinker.TinkerError, match=r"server_down: the engine at .* does not"):
            adapter.forward_backward(make_rollouts(1), "ppo").result()
        assert time.monotonic() - began < 30
