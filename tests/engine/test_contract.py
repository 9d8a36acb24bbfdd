"""The unmodified SDK against the engine: what trains, samples, saves and loads on Tinker does so
here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

PROMPT = [256, 18, 10, 19, 28, 258, 257]
ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


def ids(tokens: list[int]) -> tinker.ModelInput:
    return tinker.ModelInput.from_ints(tokens)


def datums(count: int = 3, seed: int = 0) -> list[tinker.Datum]:
    """Sequences of different lengths with random tokens, logprobs and advantages; the first half is
    prompt.
    """
    rng = np.random.default_rng(seed)
    result = []
    for index in range(count):
        length = 6 + 3 * index
        tokens = rng.integers(0, 256, length + 1)
        learned = np.arange(length) >= length // 2
        inputs = {
            "target_tokens": tokens[1:].astype(np.int64),
            "logprobs": np.where(learned, rng.normal(-5, 0.3, length), 0.0).astype(np.float32),
            "advantages": np.where(learned, rng.normal(0, 1, length), 0.0).astype(np.float32),
        }
        result.append(tinker.Datum(model_input=ids(tokens[:-1].tolist()), loss_fn_inputs=inputs))
    return result


def step(
    training: tinker.TrainingClient, data: list[tinker.Datum], loss: str = "importance_sampling"
) -> Any:
    """One pipelined train step; the forward-backward output."""
    forward = training.forward_backward(data, loss)
    optim = training.optim_step(tinker.AdamParams(**ADAM))
    output = forward.result()
    optim.result()
    return output


def logprobs_of(output: Any) -> list[np.ndarray]:
    return [
        np.asarray(loss_fn_output["logprobs"].to_numpy())
        for loss_fn_output in output.loss_fn_outputs
    ]


class Reference:
    """The same model and LoRA written out in plain torch, with Adam in numpy: nothing of the engine
    or of PEFT in it.
    """

    def __init__(self, model: str, adapter: Path, rank: int) -> None:
        from safetensors.torch import load_file

        self.module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.params = {
            k: v.clone().requires_grad_()
            for k, v in load_file(adapter / "adapter_model.safetensors").items()
        }
        for key in [key for key in self.params if ".lora_A." in key]:
            path = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            a, b = self.params[key], self.params[key.replace("lora_A", "lora_B")]
            linear = self.module.get_submodule(path)
            linear.register_forward_hook(
                lambda _, x, y, a=a, b=b: y + (32 / rank) * (x[0] @ a.T @ b.T)
            )
        self.moments = {k: (np.zeros(v.shape), np.zeros(v.shape)) for k, v in self.params.items()}
        self.steps = 0

    def logprobs(self, datum: tinker.Datum) -> torch.Tensor:
        logits = self.module(torch.tensor([datum.model_input.to_ints()])).logits[0]
        targets = torch.tensor(datum.loss_fn_inputs["target_tokens"].to_numpy())
        return torch.log_softmax(logits, -1)[torch.arange(len(targets)), targets]

    def loss(self, datum: tinker.Datum, kind: str) -> torch.Tensor:
        lp = self.logprobs(datum)
        q = torch.tensor(datum.loss_fn_inputs["logprobs"].to_numpy())
        advantage = torch.tensor(datum.loss_fn_inputs["advantages"].to_numpy())
        ratio = torch.exp(torch.where(advantage != 0, lp - q, torch.zeros_like(lp)))
        if kind == "ppo":
            return -torch.minimum(ratio * advantage, torch.clip(ratio, 0.8, 1.2) * advantage).sum()
        if kind == "cispo":
            return -(torch.clip(ratio, 0.0, 4.0).detach() * lp * advantage).sum()
        return -(ratio * advantage).sum()

    def train(self, data: list[tinker.Datum], kind: str) -> float:
        """AdamW by its definition, without weight decay; the summed loss before the step."""
        total = sum(self.loss(datum, kind) for datum in data)
        assert isinstance(total, torch.Tensor)
        gradients = torch.autograd.grad(total, list(self.params.values()))
        self.steps += 1
        for (key, param), gradient in zip(self.params.items(), gradients, strict=True):
            first, second = self.moments[key]
            g = gradient.double().numpy()
            first[:] = 0.9 * first + 0.1 * g
            second[:] = 0.95 * second + 0.05 * g * g
            m, v = first / (1 - 0.9**self.steps), second / (1 - 0.95**self.steps)
            param.data -= torch.tensor(
                ADAM["learning_rate"] * m / (np.sqrt(v) + ADAM["eps"]), dtype=torch.float32
            )
        return float(total.detach())


def checkpoint_folder(engine: Any, path: str) -> Path:
    return Path(engine.store) / path.removeprefix("tinker://")


@pytest.mark.parametrize("kind", ["importance_sampling", "ppo", "cispo"])
def test_losses_gradients_and_adam_agree_with_plain_torch(
    training: tinker.TrainingClient, engine: Any, kind: str
) -> None:
    """Three steps: losses and logprobs agree before each, the weights after the last."""
    start = training.save_weights_for_sampler("start").result().path
    reference = Reference(engine.model, checkpoint_folder(engine, start), rank=8)
    for number in range(3):
        data = datums(seed=number)
        expected_logprobs = [reference.logprobs(datum).detach().numpy() for datum in data]
        output = step(training, data, kind)
        for ours, theirs in zip(logprobs_of(output), expected_logprobs, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-4)
        assert output.metrics["loss:sum"] == pytest.approx(reference.train(data, kind), rel=1e-3)
    end = training.save_weights_for_sampler("end").result().path
    after = Reference(engine.model, checkpoint_folder(engine, end), rank=8).params
    for key, value in reference.params.items():
        np.testing.assert_allclose(
            after[key].detach().numpy(), value.detach().numpy(), atol=1e-3, err_msg=key
        )


def test_cross_entropy_takes_real_weights_and_several_targets(
    training: tinker.TrainingClient,
) -> None:
    """The SDK sends gradients of a client's own loss as weights of any sign."""
    tokens = [1, 2, 3]
    targets = np.array([[2, 5], [3, 6], [4, 7]])
    weights = np.array([[1.0, -0.5], [0.0, 2.0], [0.25, 0.0]], np.float32)
    datum = tinker.Datum(
        model_input=ids(tokens), loss_fn_inputs={"target_tokens": targets, "weights": weights}
    )
    output = training.forward_backward([datum], "cross_entropy").result()
    (logprobs,) = logprobs_of(output)
    assert logprobs.shape == (3, 2)
    assert output.metrics["loss:sum"] == pytest.approx(-(weights * logprobs).sum(), rel=1e-5)


def test_a_custom_loss_of_the_client_trains(training: tinker.TrainingClient) -> None:
    """forward_backward_custom runs the loss at the client and sends its gradient back."""

    def loss(
        data: list[tinker.Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        total = torch.stack([logprob.square().sum() for logprob in logprobs]).sum()
        return total, {"mine": float(total.detach())}

    data = [
        tinker.Datum(
            model_input=ids([1, 2, 3]), loss_fn_inputs={"target_tokens": np.array([2, 3, 4])}
        )
    ]
    before = training.forward_backward_custom(data, loss).result().metrics["mine"]
    training.optim_step(tinker.AdamParams(**ADAM)).result()
    after = training.forward_backward_custom(data, loss).result().metrics["mine"]
    assert after < before


def test_forward_adds_no_gradient(training: tinker.TrainingClient) -> None:
    training.forward(datums(), "importance_sampling").result()
    assert training.optim_step(tinker.AdamParams(**ADAM)).result().metrics["grad_norm"] == 0.0


def test_gradients_add_up_until_the_step(service: tinker.ServiceClient, engine: Any) -> None:
    """Two passes of a half each make the step of one pass of the whole."""
    whole, parts = (
        service.create_lora_training_client(base_model=engine.model, rank=8, seed=1).result()
        for _ in range(2)
    )
    data = datums(4)
    whole.forward_backward(data, "importance_sampling").result()
    for half in (data[:2], data[2:]):
        parts.forward_backward(half, "importance_sampling").result()
    norms = [
        client.optim_step(tinker.AdamParams(**ADAM)).result().metrics["grad_norm"]
        for client in (whole, parts)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_the_gradient_is_clipped_to_the_norm_that_was_asked(
    service: tinker.ServiceClient, engine: Any
) -> None:
    """Adam divides by the gradient's size, so eps is made large for the clip to show in the
    weights.
    """

    def moved(**options: float) -> float:
        client = service.create_lora_training_client(
            base_model=engine.model, rank=8, seed=1
        ).result()
        client.forward_backward(datums(), "importance_sampling").result()
        client.optim_step(tinker.AdamParams(learning_rate=1.0, eps=1e6, **options)).result()
        from safetensors.torch import load_file

        path = client.save_weights_for_sampler("clipped").result().path
        tensors = load_file(checkpoint_folder(engine, path) / "adapter_model.safetensors")
        return float(sum(value.abs().sum() for key, value in tensors.items() if "lora_B" in key))

    assert moved(grad_clip_norm=1e-3) < 0.1 * moved()


def test_two_clients_do_not_see_each_other(service: tinker.ServiceClient, engine: Any) -> None:
    one, other = (
        service.create_lora_training_client(base_model=engine.model, rank=r, seed=1).result()
        for r in (4, 8)
    )
    before = logprobs_of(other.forward(datums(), "importance_sampling").result())
    step(one, datums())
    after = logprobs_of(other.forward(datums(), "importance_sampling").result())
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)


def test_state_with_optimizer_continues_exactly_and_without_it_does_not(
    service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    step(training, datums(seed=1))
    path = training.save_state("middle").result().path
    with_adam = service.create_training_client_from_state_with_optimizer(path).result()
    without = service.create_training_client_from_state(path).result()
    results = []
    for client in (training, with_adam, without):
        step(client, datums(seed=2))
        results.append(
            client.forward_backward(datums(seed=3), "importance_sampling")
            .result()
            .metrics["loss:sum"]
        )
    assert results[0] == results[1]
    assert results[0] != results[2]


def test_a_resumed_run_equals_an_uninterrupted_one(
    service: tinker.ServiceClient, engine: Any, start_engine: Callable[..., Any], random_model: str
) -> None:
    """Four steps in one engine, and two, a checkpoint, another engine process, two more: the same
    losses, bit for bit.
    """

    def losses(client: tinker.TrainingClient, numbers: range) -> list[float]:
        return [step(client, datums(seed=number)).metrics["loss:sum"] for number in numbers]

    whole = losses(
        service.create_lora_training_client(base_model=random_model, rank=8, seed=3).result(),
        range(4),
    )
    interrupted = service.create_lora_training_client(
        base_model=random_model, rank=8, seed=3
    ).result()
    parts = losses(interrupted, range(2))
    path = interrupted.save_state("stop").result().path
    second = start_engine(random_model, engine.store)
    with tinker.ServiceClient(base_url=second.url, api_key=second.token) as other:
        parts += losses(
            other.create_training_client_from_state_with_optimizer(path).result(), range(2, 4)
        )
    assert parts == whole


def test_an_exported_adapter_gives_the_same_logprobs_in_peft(
    training: tinker.TrainingClient, engine: Any
) -> None:
    """What the engine samples with is what `peft` loads."""
    for number in range(3):
        step(training, datums(seed=number))
    path = training.save_weights_for_sampler("peft").result().path
    sampler = training.create_sampling_client(path).result()
    served = sampler.compute_logprobs(ids(PROMPT)).result()[1:]
    base = AutoModelForCausalLM.from_pretrained(engine.model, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(checkpoint_folder(engine, path))).eval()
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0, :-1]
    expected = torch.log_softmax(logits, -1)[
        torch.arange(len(PROMPT) - 1), torch.tensor(PROMPT[1:])
    ]
    np.testing.assert_allclose(np.array(served, dtype=np.float64), expected.numpy(), atol=1e-3)


def test_a_snapshot_does_not_move_with_training(training: tinker.TrainingClient) -> None:
    """A reference policy must stay where it was."""
    frozen = training.save_weights_and_get_sampling_client().result()
    before = frozen.compute_logprobs(ids(PROMPT)).result()
    step(training, datums())
    moved = training.save_weights_and_get_sampling_client().result()
    assert frozen.compute_logprobs(ids(PROMPT)).result() == before
    assert moved.compute_logprobs(ids(PROMPT)).result() != before


def test_an_error_leaves_the_client_usable(training: tinker.TrainingClient) -> None:
    """Each mistake names itself, and the next call works."""
    good = datums(1)
    short = tinker.Datum(
        model_input=ids([1, 2, 3]),
        loss_fn_inputs={
            "target_tokens": np.array([2, 3]),
            "logprobs": np.zeros(2, np.float32),
            "advantages": np.ones(2, np.float32),
        },
    )
    outside = tinker.Datum(
        model_input=ids([1, 9999]), loss_fn_inputs={"target_tokens": np.array([2, 3])}
    )
    lacking = tinker.Datum(
        model_input=ids([1, 2]), loss_fn_inputs={"target_tokens": np.array([2, 3])}
    )
    for data, loss, message in (
        (good, "stable_reinforce", "'stable_reinforce' is not supported"),
        ([short], "importance_sampling", "model_input has 3 tokens, target_tokens has 2"),
        ([outside], "cross_entropy", "datum 0: model_input has a token id outside the vocabulary"),
        ([lacking], "ppo", "datum 0 lacks logprobs, advantages, which ppo needs"),
    ):
        with pytest.raises(tinker.RequestFailedError, match=message):
            training.forward_backward(data, loss).result()
    with pytest.raises(tinker.RequestFailedError, match="already exists"):
        training.save_state("twice").result(), training.save_state("twice").result()
    assert step(training, good).metrics["loss:sum"] != 0


def test_a_wrong_token_or_model_is_refused(service: tinker.ServiceClient, engine: Any) -> None:
    assert httpx.get(f"{engine.url}/api/v1/healthz").status_code == 401
    assert (
        httpx.post(
            f"{engine.url}/api/v1/create_session", headers={"X-API-Key": "tml-other"}, json={}
        ).status_code
        == 401
    )
    with pytest.raises(tinker.RequestFailedError, match="this engine serves"):
        service.create_lora_training_client(base_model="Qwen/Qwen3-8B").result()


def test_fields_of_a_later_sdk_are_ignored_and_wrong_types_are_named(engine: Any) -> None:
    """What the SDK will send one day must not break a client of today's engine."""
    headers = {"X-API-Key": engine.token}
    with httpx.Client(base_url=f"{engine.url}/api/v1", headers=headers) as client:

        def create(number: int, config: dict[str, Any]) -> httpx.Response:
            body = {"session_id": session, "model_seq_id": number, "base_model": engine.model}
            return client.post("/create_model", json={**body, "lora_config": config})

        session = client.post("/create_session", json={}).json()["session_id"]
        model = create(0, {"rank": 4, "seed": None, "alpha": 64, "dora": True}).json()
        made = client.post("/retrieve_future", json={"request_id": model["request_id"]}).json()
        assert made == {"model_id": model["model_id"]}
        info = client.post("/get_info", json={"model_id": model["model_id"]}).json()
        assert info["lora_rank"] == 4
        step = {
            "model_id": model["model_id"],
            "adam_params": {"learning_rate": 1e-4, "nesterov": False},
        }
        taken = client.post("/optim_step", json=step).json()
        assert "detail" not in taken, taken
        step["adam_params"]["nesterov"] = True
        refused = client.post("/optim_step", json=step)
        answer = refused.json()
        if "request_id" in answer:
            answer = client.post(
                "/retrieve_future", json={"request_id": answer["request_id"]}
            ).json()
        assert "adam_params has no nesterov" in str(answer)
        for number, (field, value) in enumerate({"rank": "8", "train_mlp": 1, "seed": 0.5}.items()):
            refused = create(1 + number, {"rank": 4, field: value})
            assert refused.status_code == 400
            assert f"lora_config.{field} is {value!r}" in refused.json()["detail"]


def test_capabilities_and_listing(
    service: tinker.ServiceClient, training: tinker.TrainingClient, engine: Any
) -> None:
    (model,) = service.get_server_capabilities().supported_models
    assert (model.model_name, model.max_context_length) == (engine.model, 512)
    path = training.save_state("listed").result().path
    training.save_weights_for_sampler("listed").result()
    rest = service.create_rest_client()
    run_id = path.removeprefix("tinker://").split("/")[0]
    found = {
        checkpoint.tinker_path: checkpoint.checkpoint_type
        for checkpoint in rest.list_checkpoints(run_id).result().checkpoints
    }
    assert found == {path: "training", path.replace("/weights/", "/sampler_weights/"): "sampler"}
    assert run_id in [
        run.training_run_id for run in rest.list_training_runs(limit=100).result().training_runs
    ]
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert path not in [
        checkpoint.tinker_path for checkpoint in rest.list_checkpoints(run_id).result().checkpoints
    ]


def test_a_checkpoint_is_published_and_made_private_again(
    service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    """Each may be repeated; what is not there is refused at once."""
    path = training.save_state("published").result().path
    rest = service.create_rest_client()

    def is_public() -> bool:
        checkpoints = rest.list_checkpoints(path.split("/")[2]).result().checkpoints
        return next(
            checkpoint.public for checkpoint in checkpoints if checkpoint.tinker_path == path
        )

    assert not is_public()
    for change, expected in (
        (rest.publish_checkpoint_from_tinker_path, True),
        (rest.unpublish_checkpoint_from_tinker_path, False),
    ):
        for _ in range(2):
            change(path).result()
            assert is_public() is expected
        with pytest.raises(tinker.BadRequestError, match="there is no checkpoint"):
            change(path.replace("published", "absent")).result(timeout=30)


def test_deleting_and_listing_take_no_time_even_where_a_record_is_damaged(
    service: tinker.ServiceClient, training: tinker.TrainingClient, engine: Any
) -> None:
    """The SDK repeats what fails as a fault of the server for five minutes without a word."""
    rest = service.create_rest_client()
    path, damaged = (training.save_state(name).result().path for name in ("kept", "damaged"))
    run_id = path.split("/")[2]
    record = checkpoint_folder(engine, damaged) / "checkpoint.json"
    content = record.read_bytes()
    record.write_bytes(b"")
    with pytest.raises(tinker.BadRequestError, match="cannot be read"):
        rest.delete_checkpoint_from_tinker_path(damaged).result(timeout=30)
    listed = rest.list_checkpoints(run_id).result(timeout=30).checkpoints
    assert [one.tinker_path for one in listed] == [path]
    record.write_bytes(content)
    for one in (path, damaged):
        rest.delete_checkpoint_from_tinker_path(one).result(timeout=30)
    assert rest.list_checkpoints(run_id).result(timeout=30).checkpoints == []
    assert rest.get_training_run(run_id).result(timeout=30).last_checkpoint is None
    all_paths = [
        checkpoint.tinker_path for checkpoint in rest.list_user_checkpoints().result(30).checkpoints
    ]
    assert not {path, damaged} & set(all_paths)


def test_the_tinker_command_downloads_a_checkpoint(
    training: tinker.TrainingClient, engine: Any, tmp_path: Path
) -> None:
    """The vendor's command line gets a PEFT adapter from us."""
    path = training.save_state("download").result().path
    command = [
        sys.executable,
        "-m",
        "tinker.cli",
        "checkpoint",
        "download",
        path,
        "--output",
        str(tmp_path),
    ]
    env = {**os.environ, "TINKER_BASE_URL": engine.url, "TINKER_API_KEY": engine.token}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    (config,) = tmp_path.rglob("adapter_config.json")
    assert json.loads(config.read_text())["r"] == 8
    assert list(tmp_path.rglob("adapter_model.safetensors"))
