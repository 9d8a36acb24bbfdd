"""Batches, a training step, and a reference in plain torch, for the tests of the engine."""

from pathlib import Path
from typing import Any

import numpy as np
import tinker
import torch
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
