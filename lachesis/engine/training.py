"""One client's training state: an adapter, its gradients and its Adam optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from lachesis.engine import losses
from lachesis.engine.lora import Adapters, LoraSpec
from lachesis.engine.model import BaseModel
from lachesis.engine.wire import Array, Datum
from lachesis.errors import EngineRequestError

# Logits are the largest tensor of a pass: (rows, tokens, vocabulary) float32. A quarter of a gibibyte of them at a time.
MAX_LOGITS = 2**26
ADAM_KEYS = {"learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"}


class TrainingModel:
    """Only the model thread may call this. Gradients add up over `forward_backward` until `optim_step` uses them."""

    def __init__(self, name: str, adapters: Adapters, spec: LoraSpec) -> None:
        self.name, self.adapters, self.spec = name, adapters, spec
        adapters.add(name, spec)
        self.optimizer = self._new_optimizer()

    def _new_optimizer(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.adapters.parameters(self.name), lr=0.0, weight_decay=0.0)

    def forward_backward(
        self, data: list[Datum], loss_fn: str, config: dict[str, Any], *, forward_only: bool
    ) -> tuple[list[Array], dict[str, float]]:
        """Per datum the log-probability of each target, (N,) or (N, K), and the summed loss. Adds to the gradients unless
        `forward_only`. Raises EngineRequestError for a datum that does not fit the loss; no gradient is added then."""
        numbers = losses.check(loss_fn, config)
        for index, datum in enumerate(data):
            _check_datum(index, datum, loss_fn, self.adapters.base)
        model = self.adapters.activate(self.name)
        logprobs_D: list[Array] = [np.zeros(0, np.float32)] * len(data)
        total = 0.0
        with torch.set_grad_enabled(not forward_only):
            for members in _micro_batches(data, self.adapters.base.vocabulary):
                total += self._pass(model, data, members, loss_fn, numbers, logprobs_D, backward=not forward_only)
        return logprobs_D, {"loss:sum": total}

    def _pass(
        self,
        model: torch.nn.Module,
        data: list[Datum],
        members: list[int],
        loss_fn: str,
        numbers: dict[str, float],
        logprobs_D: list[Array],
        *,
        backward: bool,
    ) -> float:
        device = self.adapters.base.device
        width = max(len(data[index].tokens) for index in members)
        tokens = torch.zeros(len(members), width, dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for row, index in enumerate(members):
            length = len(data[index].tokens)
            tokens[row, :length] = torch.from_numpy(data[index].tokens)
            mask[row, :length] = 1
        logits = model(input_ids=tokens.to(device), attention_mask=mask.to(device), use_cache=False).logits
        loss = torch.zeros((), device=device)
        for row, index in enumerate(members):
            datum = data[index]
            logprobs = _target_logprobs(logits[row, : len(datum.tokens)].float(), datum, device)
            inputs = {
                key: torch.from_numpy(value.astype(np.float32)).to(device)
                for key, value in datum.inputs.items()
                if key != "target_tokens"
            }
            if loss_fn == "cross_entropy" and "weights" not in inputs:
                inputs["weights"] = torch.ones_like(logprobs)
            loss = loss + losses.LOSSES[loss_fn](logprobs, inputs, numbers).sum()
            logprobs_D[index] = logprobs.detach().cpu().numpy()
        if backward:
            loss.backward()
        return float(loss.detach())

    def optim_step(self, adam: dict[str, float]) -> dict[str, float]:
        """One AdamW step (Loshchilov & Hutter 2019, arXiv:1711.05101) with these numbers, then the gradients are cleared.
        `grad_clip_norm` > 0 clips the global norm first. The answer holds the norm before clipping."""
        unknown = sorted(set(adam) - ADAM_KEYS)
        if unknown:
            raise EngineRequestError(f"adam_params has no {', '.join(unknown)}; allowed: {', '.join(sorted(ADAM_KEYS))}")
        parameters = self.adapters.parameters(self.name)
        limit = adam.get("grad_clip_norm", 0.0)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, limit if limit > 0 else math.inf))
        if not math.isfinite(norm):
            self.optimizer.zero_grad()
            raise EngineRequestError(f"the gradient norm is {norm}; the gradients were dropped and no weight has changed")
        for group in self.optimizer.param_groups:
            group.update(
                lr=adam.get("learning_rate", 1e-4),
                betas=(adam.get("beta1", 0.9), adam.get("beta2", 0.95)),
                eps=adam.get("eps", 1e-12),
                weight_decay=adam.get("weight_decay", 0.0),
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"grad_norm": norm}

    def optimizer_tensors(self) -> dict[str, torch.Tensor]:
        """Adam's moments and step counts, keyed `{parameter index}.{name}`, on the CPU."""
        state = self.optimizer.state_dict()["state"]
        return {f"{i}.{key}": value.cpu().contiguous().clone() for i, one in state.items() for key, value in one.items()}

    def load(self, tensors: dict[str, torch.Tensor], optimizer: dict[str, torch.Tensor] | None) -> None:
        """Replace the weights; with `optimizer` Adam continues where it was, without it starts anew. Pending gradients go."""
        self.adapters.load(self.name, tensors)
        self.optimizer = self._new_optimizer()
        if optimizer:
            state: dict[int, dict[str, torch.Tensor]] = {}
            for key, value in optimizer.items():
                index, name = key.split(".", 1)
                state.setdefault(int(index), {})[name] = value
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        for parameter in self.adapters.parameters(self.name):
            parameter.grad = None


def _target_logprobs(logits: torch.Tensor, datum: Datum, device: torch.device) -> torch.Tensor:
    """(N,) or (N, K): the log-softmax of logits (N, V) at the targets."""
    targets = torch.from_numpy(datum.inputs["target_tokens"].astype(np.int64)).to(device)
    flat = targets.reshape(len(targets), -1)
    return torch.log_softmax(logits, -1).gather(1, flat).reshape(targets.shape)


def _micro_batches(data: list[Datum], vocabulary: int) -> Iterator[list[int]]:
    """Indices of datums, short ones together, so that one pass stays below MAX_LOGITS."""
    members: list[int] = []
    for index in sorted(range(len(data)), key=lambda i: len(data[i].tokens)):
        if members and (len(members) + 1) * len(data[index].tokens) * vocabulary > MAX_LOGITS:
            yield members
            members = []
        members.append(index)
    if members:
        yield members


def _check_datum(index: int, datum: Datum, loss_fn: str, base: BaseModel) -> None:
    needed = ["target_tokens"] if loss_fn == "cross_entropy" else ["target_tokens", "logprobs", "advantages"]
    missing = [key for key in needed if key not in datum.inputs]
    if missing:
        raise EngineRequestError(f"datum {index} lacks {', '.join(missing)}, which {loss_fn} needs")
    length = len(datum.tokens)
    if not 0 < length <= base.context:
        raise EngineRequestError(f"datum {index} has {length} tokens; allowed: 1 to {base.context}")
    targets = datum.inputs["target_tokens"]
    if len(targets) != length:
        raise EngineRequestError(f"datum {index}: model_input has {length} tokens, target_tokens has {len(targets)}")
    for name, ids in (("model_input", datum.tokens), ("target_tokens", targets)):
        if ids.min() < 0 or ids.max() >= base.vocabulary:
            raise EngineRequestError(
                f"datum {index}: {name} has a token id outside the vocabulary (0 to {base.vocabulary - 1})"
            )
    for key, value in datum.inputs.items():
        if key in ("weights", "logprobs", "advantages") and value.shape != targets.shape:
            raise EngineRequestError(f"datum {index}: {key} has shape {value.shape}, target_tokens {targets.shape}")
        if key != "target_tokens" and not np.isfinite(value.astype(np.float64)).all():
            raise EngineRequestError(f"datum {index}: {key} holds a value that is not finite")
