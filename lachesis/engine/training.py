"""One client's training state: an adapter, its gradients and its Adam optimizer."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from lachesis.base.errors import EngineRequestError
from lachesis.engine import lora, losses
from lachesis.engine.lora import LoraSpec, Snapshot
from lachesis.engine.model import BaseModel
from lachesis.engine.protobuf_messages import Array, Datum

MOST_LOGITS = 2**26
"""Logits are the largest tensor of a pass: (tokens, vocabulary) float32. A quarter of a gibibyte of them at a time."""
MOST_TOKENS = 2**13
"""Of one pass, padding included."""
WASTE = 0.1
"""Share of padding that a pass may have."""
SMALL_WASTE = 256
"""Positions of padding that cost less than another pass."""
ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}
"""The settings of a step and their defaults."""

Trained = tuple[list[Array], dict[str, float]]


class TrainingModel:
    """Only the model thread may call this. Gradients add up over `forward_backward` until `optim_step` uses them."""

    def __init__(self, base: BaseModel, spec: LoraSpec) -> None:
        self.base, self.spec = base, spec
        fresh = base.sites.new_factors(spec)
        # All parameters lie in one tensor, and so do their gradients: a step, a copy and a norm are one operation each.
        count = sum(one.numel() for one in lora.parameters(fresh))
        self._flat = torch.nn.Parameter(torch.zeros(count, device=base.device), requires_grad=False)
        self._gradient = torch.zeros_like(self._flat)
        self.factors: lora.Factors = {}
        at = 0
        for path, pair in fresh.items():
            own = []
            for one in pair:
                view = self._flat.data[at : at + one.numel()].view(one.shape).copy_(one).requires_grad_()
                view.grad = self._gradient[at : at + one.numel()].view(one.shape)
                own.append(view)
                at += one.numel()
            self.factors[path] = (own[0], own[1])
        self._live = Snapshot(self.factors, spec.scale)
        self._adam = self._new_optimizer()

    def _new_optimizer(self) -> torch.optim.AdamW:
        self._flat.grad = self._gradient
        return torch.optim.AdamW([self._flat], lr=0.0, weight_decay=0.0, fused=True)

    def snapshot(self) -> Snapshot:
        """A copy of the adapter as it is now, for sampling."""
        flat, at = self._flat.detach().clone(), 0
        factors: lora.Factors = {}
        for path, pair in self.factors.items():
            views = []
            for one in pair:
                views.append(flat[at : at + one.numel()].view(one.shape))
                at += one.numel()
            factors[path] = (views[0], views[1])
        return Snapshot(factors, self.spec.scale)

    def forward_backward(
        self, data: list[Datum], loss_fn: str, config: Mapping[str, object], *, forward_only: bool
    ) -> Generator[None, None, Trained]:
        """Per datum the log-probability of each target, (N,) or (N, K), and the summed loss. Adds to the gradients unless
        `forward_only`. Yields between passes, so that other work can go in between. Raises EngineRequestError for a datum that
        does not fit the loss; no gradient is added then."""
        settings = losses.check(loss_fn, config)
        if not data:
            raise EngineRequestError("the data are empty; at least one datum is needed")
        for index, datum in enumerate(data):
            _check_datum(index, datum, loss_fn, self.base)
        logprobs_D: list[Array] = [np.zeros(0, np.float32)] * len(data)
        total = 0.0
        for members in _passes(data, self.base.vocabulary):
            self.base.sites.train(self._live)
            with torch.set_grad_enabled(not forward_only):
                total += self._pass([data[index] for index in members], members, loss_fn, settings, logprobs_D)
            yield
        return logprobs_D, {"loss:sum": total}

    def _pass(
        self, data: list[Datum], members: list[int], loss_fn: str, settings: dict[str, float], logprobs_D: list[Array]
    ) -> float:
        """One forward pass, and the backward one where gradients are on, over datums whose targets have one number of
        columns."""
        device, lengths = self.base.device, [len(datum.tokens) for datum in data]
        tokens = np.zeros((len(data), max(lengths)), np.int64)
        real = np.zeros(tokens.shape, bool)
        for row, datum in enumerate(data):
            tokens[row, : lengths[row]], real[row, : lengths[row]] = datum.tokens, True
        states = self.base.states(torch.from_numpy(tokens).to(device))[torch.from_numpy(real).to(device)]
        targets = torch.from_numpy(_joined(data, "target_tokens", np.int64)).to(device)
        logprobs = self._logprobs(states, targets.reshape(len(targets), -1)).view(targets.shape)
        names = [name for name in data[0].inputs if name != "target_tokens"]  # all of them are the loss's, see `_check_datum`
        inputs = {name: torch.from_numpy(_joined(data, name, np.float32)).to(device) for name in names}
        inputs["sequence"] = torch.from_numpy(np.repeat(np.arange(len(data)), lengths)).to(device)
        loss = losses.LOSSES[loss_fn].formula(logprobs, inputs, settings).sum()
        if loss.requires_grad:
            loss.backward()
        values = np.split(logprobs.detach().cpu().numpy(), np.cumsum(lengths)[:-1])
        for index, one in zip(members, values, strict=True):
            logprobs_D[index] = one
        return float(loss.detach())

    def _logprobs(self, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """(N, K) log-probabilities of the targets (N, K). Logits that are too many are made in parts, and again for the
        gradient."""

        def part(states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return TargetLogprobs.apply(self.base.logits(states), targets)

        size = max(1, MOST_LOGITS // self.base.vocabulary)
        if len(states) <= size or not torch.is_grad_enabled():
            return torch.cat([part(*both) for both in zip(states.split(size), targets.split(size), strict=True)])
        pairs = zip(states.split(size), targets.split(size), strict=True)
        return torch.cat([checkpoint(part, *both, use_reentrant=False) for both in pairs])

    def optim_step(self, adam: Mapping[str, object]) -> dict[str, float]:
        """One AdamW step (Loshchilov & Hutter 2019, arXiv:1711.05101) with these numbers, then the gradients are cleared.
        `grad_clip_norm` > 0 clips the global norm first. The answer holds the norm before clipping."""
        numbers = _check_adam(adam)
        norm = float(torch.linalg.vector_norm(self._gradient))
        if not math.isfinite(norm):
            self._gradient.zero_()
            raise EngineRequestError(f"the gradient norm is {norm}; the gradients were dropped and no weight has changed")
        if 0 < numbers["grad_clip_norm"] < norm:
            self._gradient.mul_(numbers["grad_clip_norm"] / (norm + 1e-6))
        (group,) = self._adam.param_groups
        group.update(
            lr=numbers["learning_rate"],
            betas=(numbers["beta1"], numbers["beta2"]),
            eps=numbers["eps"],
            weight_decay=numbers["weight_decay"],
        )
        self._adam.step()
        self._gradient.zero_()
        return {"grad_norm": norm}

    def optimizer_tensors(self) -> dict[str, torch.Tensor]:
        """Adam's moments and step count, on the CPU."""
        state = self._adam.state_dict()["state"].get(0, {})
        return {name: value.cpu().contiguous().clone() for name, value in state.items()}

    def load(self, factors: lora.Factors, optimizer: dict[str, torch.Tensor] | None, where: str) -> None:
        """Replace the weights; with `optimizer` Adam continues where it was, without it starts anew. Pending gradients go.
        Raises EngineRequestError for an adapter of other layers or sizes, and changes nothing then."""
        own = {path: (tuple(a.shape), tuple(b.shape)) for path, (a, b) in self.factors.items()}
        if {path: (tuple(a.shape), tuple(b.shape)) for path, (a, b) in factors.items()} != own:
            raise EngineRequestError(
                f"{where} has other layers, or another rank, than the model, whose rank is {self.spec.rank}"
            )
        for path, pair in factors.items():
            for mine, new in zip(self.factors[path], pair, strict=True):
                mine.data.copy_(new)
        self._gradient.zero_()
        self._adam = self._new_optimizer()
        if optimizer:
            if set(optimizer) != {"step", "exp_avg", "exp_avg_sq"} or optimizer["exp_avg"].shape != self._flat.shape:
                raise EngineRequestError(
                    f"{where} holds an optimizer of another engine ({sorted(optimizer)[:3]}); load it without"
                )
            self._adam.load_state_dict({**self._adam.state_dict(), "state": {0: optimizer}})


class TargetLogprobs(torch.autograd.Function):
    """log softmax of logits (N, V) at targets (N, K): l_t - logsumexp(l). Its gradient is 1[v = t] - softmax(l)_v, which is
    written over the logits: they are the largest tensor there is, and nothing else needs them."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        total = torch.logsumexp(logits, -1, keepdim=True)
        ctx.save_for_backward(logits, total, targets)
        return logits.gather(1, targets) - total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, total, targets = ctx.saved_tensors
        share = logits.sub_(total).exp_().mul_(-gradient.sum(1, keepdim=True))
        return share.scatter_add_(1, targets, gradient), None


def _joined(data: list[Datum], name: str, kind: type) -> Array:
    return np.concatenate([datum.inputs[name] for datum in data]).astype(kind, copy=False)


def _passes(data: list[Datum], vocabulary: int) -> Iterator[list[int]]:
    """Indices of datums that go through the model together: of like length, with the same inputs."""

    def kind(index: int) -> tuple[Any, ...]:
        inputs = data[index].inputs
        return tuple(sorted(inputs)), inputs["target_tokens"].shape[1:], len(data[index].tokens)

    members: list[int] = []
    real = 0
    for index in sorted(range(len(data)), key=kind):
        length = len(data[index].tokens)
        whole = length * (len(members) + 1)
        waste = whole - real - length
        full = whole * vocabulary > MOST_LOGITS or whole > MOST_TOKENS or waste > max(SMALL_WASTE, WASTE * whole)
        if members and (full or kind(index)[:2] != kind(members[0])[:2]):
            yield members
            members, real = [], 0
        members.append(index)
        real += length
    yield members


def _check_datum(index: int, datum: Datum, loss_fn: str, base: BaseModel) -> None:
    needed = ("target_tokens", *losses.LOSSES[loss_fn].inputs)
    missing = [key for key in needed if key not in datum.inputs]
    if missing:
        raise EngineRequestError(f"datum {index} lacks {', '.join(missing)}, which {loss_fn} needs")
    length = len(datum.tokens)
    if not 0 < length <= base.context:
        raise EngineRequestError(f"datum {index} has {length} tokens; allowed: 1 to {base.context}")
    targets = datum.inputs["target_tokens"]
    if targets.ndim not in (1, 2) or len(targets) != length or targets.size == 0:
        raise EngineRequestError(
            f"datum {index}: model_input has {length} tokens, target_tokens has {len(targets) if targets.ndim else 0} "
            f"(its shape is {targets.shape}; allowed: ({length},) and ({length}, K))"
        )
    for name, ids in (("model_input", datum.tokens), ("target_tokens", targets)):
        if ids.min() < 0 or ids.max() >= base.vocabulary:
            raise EngineRequestError(
                f"datum {index}: {name} has a token id outside the vocabulary (0 to {base.vocabulary - 1})"
            )
    unknown = sorted(set(datum.inputs) - {*needed, "weights"})
    if unknown:
        raise EngineRequestError(
            f"datum {index} has {', '.join(unknown)}, which {loss_fn} does not use; allowed: {', '.join(needed)}, weights"
        )
    for key, value in datum.inputs.items():
        if key != "target_tokens" and value.shape != targets.shape:
            raise EngineRequestError(f"datum {index}: {key} has shape {value.shape}, target_tokens {targets.shape}")
        if key != "target_tokens" and not np.isfinite(value.astype(np.float64)).all():
            raise EngineRequestError(f"datum {index}: {key} holds a value that is not finite")


def _check_adam(adam: Mapping[str, object]) -> dict[str, float]:
    """Return a step's numbers, defaults included. A field of a later SDK is ignored while it is null, 0 or false.

    Raises:
        EngineRequestError: A number would ruin the adapter (JSON has no NaN and no infinity, so
            they come as null), or a field that is not known here asks for something.
    """
    unknown = sorted(key for key, value in adam.items() if key not in ADAM and value)
    if unknown:
        raise EngineRequestError(f"adam_params has no {', '.join(unknown)}; allowed: {', '.join(sorted(ADAM))}")
    numbers = dict(ADAM)
    for key in set(adam) & set(ADAM):
        value = adam[key]
        least_wrong = 1.0 if key in ("beta1", "beta2") else float("inf")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < least_wrong:
            limit = "at least 0 and below 1" if least_wrong == 1 else "finite and at least 0"
            raise EngineRequestError(
                f"adam_params.{key} is {'not finite' if value is None else repr(value)}; a number is needed, {limit}"
            )
        numbers[key] = float(value)
    return numbers
