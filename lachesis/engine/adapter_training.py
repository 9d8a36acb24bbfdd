"""Train one adapter: hold its parameters, gradients and Adam optimizer."""

import logging
import math
from collections.abc import Generator, Mapping

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from lachesis.base.arrays import Array
from lachesis.base.errors import EngineRequestError, InsufficientMemoryError
from lachesis.engine import losses
from lachesis.engine.base_model import lora_layers
from lachesis.engine.base_model.device import is_out_of_memory, release_cached_memory
from lachesis.engine.base_model.forward_pass import BaseLanguageModel
from lachesis.engine.base_model.lora_layers import LoraAdapter
from lachesis.engine.base_model.memory_plan import describe_single_sequence
from lachesis.engine.base_model.output_head import MAX_LOGITS_PER_PART, TargetLogprobs
from lachesis.engine.training_passes import check_datum, concatenate_inputs, group_into_passes
from lachesis.tinker_server.json_messages import ADAM_DEFAULTS
from lachesis.tinker_server.model_description import LoraSpec
from lachesis.tinker_server.protobuf_messages import DecodedDatum

log = logging.getLogger(__name__)

ForwardBackwardResult = tuple[list[Array], dict[str, float]]


class TrainingModel:
    """Train one adapter. Only the model thread may call this.

    Gradients accumulate over `forward_backward` calls until `optim_step` uses them.
    """

    def __init__(self, base: BaseLanguageModel, spec: LoraSpec) -> None:
        self.base, self.spec = base, spec
        initial_factors = base.lora_layers.create_factors(spec)
        # All parameters are in one tensor, and so are their gradients, so that a step, a copy and a
        # norm take one operation each.
        num_parameters = sum(
            tensor.numel() for tensor in lora_layers.iterate_parameters(initial_factors)
        )
        self._flat_parameters = torch.nn.Parameter(
            torch.zeros(num_parameters, device=base.device), requires_grad=False
        )
        self._gradient = torch.zeros_like(self._flat_parameters)
        self.factors: lora_layers.Factors = {}
        offset = 0
        for path, pair in initial_factors.items():
            views = []
            for tensor in pair:
                view = (
                    self._flat_parameters.data[offset : offset + tensor.numel()]
                    .view(tensor.shape)
                    .copy_(tensor)
                    .requires_grad_()
                )
                view.grad = self._gradient[offset : offset + tensor.numel()].view(tensor.shape)
                views.append(view)
                offset += tensor.numel()
            self.factors[path] = (views[0], views[1])
        self._trained_adapter = LoraAdapter(self.factors, spec.scale)
        self._optimizer = self._create_optimizer()

    def _create_optimizer(self) -> torch.optim.AdamW:
        self._flat_parameters.grad = self._gradient
        return torch.optim.AdamW([self._flat_parameters], lr=0.0, weight_decay=0.0, fused=True)

    def snapshot(self) -> LoraAdapter:
        """Return a copy of the current adapter for sampling."""
        flat, offset = self._flat_parameters.detach().to(self.base.module.dtype, copy=True), 0
        factors: lora_layers.Factors = {}
        for path, pair in self.factors.items():
            views = []
            for tensor in pair:
                views.append(flat[offset : offset + tensor.numel()].view(tensor.shape))
                offset += tensor.numel()
            factors[path] = (views[0], views[1])
        return LoraAdapter(factors, self.spec.scale)

    def forward_backward(
        self,
        data: list[DecodedDatum],
        loss_fn: str,
        config: Mapping[str, object],
        *,
        forward_only: bool,
    ) -> Generator[None, None, ForwardBackwardResult]:
        """Compute the log-probability of each datum's targets, (N,) or (N, K), and the summed loss.

        Add to the gradients unless `forward_only`. Yield between passes, so that other work can
        run.

        Raises:
            EngineRequestError: A datum does not fit the loss; no gradient is added then.
        """
        settings = losses.resolve_settings(loss_fn, config)
        if not data:
            raise EngineRequestError("the data are empty; at least one datum is needed")
        for index, datum in enumerate(data):
            check_datum(index, datum, loss_fn, self.base)
        logprobs_D: list[Array] = [np.zeros(0, np.float32)] * len(data)
        total = 0.0
        for datum_indices in group_into_passes(data, self.base):
            total += yield from self._run_fitting_passes(
                data, datum_indices, loss_fn, settings, logprobs_D, forward_only=forward_only
            )
        return logprobs_D, {"loss:sum": total}

    def _run_fitting_passes(
        self,
        data: list[DecodedDatum],
        datum_indices: list[int],
        loss_fn: str,
        settings: dict[str, float],
        logprobs_D: list[Array],
        *,
        forward_only: bool,
    ) -> Generator[None, None, float]:
        """Run a pass over some datums and return its loss; yield after each pass.

        A pass that runs out of memory leaves the gradients as they were. It is repeated as two of
        half the size, or, with a single datum, by computing activations again.

        Raises:
            InsufficientMemoryError: A single datum does not fit.
        """
        pass_data = [data[index] for index in datum_indices]
        num_tokens = len(pass_data) * max(len(datum.tokens) for datum in pass_data)
        self.base.lora_layers.use_for_training(self._trained_adapter)
        recomputes = not forward_only and self.base.memory_plan.recomputes(num_tokens)
        try:
            with (
                torch.set_grad_enabled(not forward_only),
                self.base.recompute_activations(recomputes),
            ):
                loss, values = self._run_pass(pass_data, loss_fn, settings)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).splitlines()[0]
        else:
            for index, datum_logprobs in zip(datum_indices, values, strict=True):
                logprobs_D[index] = datum_logprobs
            yield
            return loss
        # Here the error, and the tensors that it refers to, are gone.
        release_cached_memory(self.base.device)
        log.warning("a pass over %d tokens ran out of memory: %s", num_tokens, reason)
        if len(datum_indices) > 1:
            self.base.memory_plan = self.base.memory_plan.shrink_passes(num_tokens)
            middle = len(datum_indices) // 2
            parts = [datum_indices[:middle], datum_indices[middle:]]
        elif not recomputes and not forward_only and self.base.can_recompute:
            self.base.memory_plan = self.base.memory_plan.recompute_from(num_tokens)
            parts = [datum_indices]
        else:
            raise InsufficientMemoryError(describe_single_sequence(num_tokens, self.spec.rank))
        total = 0.0
        for part in parts:
            total += yield from self._run_fitting_passes(
                data, part, loss_fn, settings, logprobs_D, forward_only=forward_only
            )
        return total

    def _run_pass(
        self, data: list[DecodedDatum], loss_fn: str, settings: dict[str, float]
    ) -> tuple[float, list[Array]]:
        """Return the summed loss, and the log-probabilities of each datum's targets.

        All datums have equally many targets. If gradients are on, those of the pass are added to
        the collected ones at its end.
        """
        device, lengths = self.base.device, [len(datum.tokens) for datum in data]
        tokens = np.zeros((len(data), max(lengths)), np.int64)
        is_token = np.zeros(tokens.shape, bool)
        for row, datum in enumerate(data):
            tokens[row, : lengths[row]], is_token[row, : lengths[row]] = datum.tokens, True
        states = self.base.compute_states(torch.from_numpy(tokens).to(device))[
            torch.from_numpy(is_token).to(device)
        ]
        targets = torch.from_numpy(concatenate_inputs(data, "target_tokens", np.int64)).to(device)
        logprobs = self._compute_logprobs(states, targets.reshape(len(targets), -1)).view(
            targets.shape
        )
        # `check_datum` has made sure that the loss uses all inputs.
        names = [name for name in data[0].inputs if name != "target_tokens"]
        inputs = {
            name: torch.from_numpy(concatenate_inputs(data, name, np.float32)).to(device)
            for name in names
        }
        inputs["sequence"] = torch.from_numpy(np.repeat(np.arange(len(data)), lengths)).to(device)
        loss = losses.LOSSES[loss_fn].formula(logprobs, inputs, settings).sum()
        if loss.requires_grad:
            self._add_gradients(loss)
        values = np.split(logprobs.detach().cpu().numpy(), np.cumsum(lengths)[:-1])
        return float(loss.detach()), values

    def _add_gradients(self, loss: torch.Tensor) -> None:
        """Add the gradients of a loss, all of them or none."""
        parameters = list(lora_layers.iterate_parameters(self.factors))
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        pairs = [
            (parameter.grad, gradient)
            for parameter, gradient in zip(parameters, gradients, strict=True)
            if gradient is not None
        ]
        torch._foreach_add_([pair[0] for pair in pairs], [pair[1] for pair in pairs])

    def _compute_logprobs(self, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities (N, K) of the targets (N, K).

        If there are too many logits, they are computed in parts, and again for the gradient.
        """

        def compute_part(states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return TargetLogprobs.apply(self.base.compute_logits(states), targets)

        chunk_size = max(1, MAX_LOGITS_PER_PART // self.base.vocab_size)
        if len(states) <= chunk_size or not torch.is_grad_enabled():
            return torch.cat(
                [
                    compute_part(*chunk)
                    for chunk in zip(
                        states.split(chunk_size), targets.split(chunk_size), strict=True
                    )
                ]
            )
        chunks = zip(states.split(chunk_size), targets.split(chunk_size), strict=True)
        return torch.cat(
            [checkpoint(compute_part, *chunk, use_reentrant=False) for chunk in chunks]
        )

    def optim_step(self, adam_params: Mapping[str, object]) -> dict[str, float]:
        """Take one AdamW step (Loshchilov & Hutter 2019, arXiv:1711.05101), then clear the
        gradients.

        If `grad_clip_norm` > 0, the global norm is clipped first. The result holds the norm before
        clipping.
        """
        settings = _parse_adam_params(adam_params)
        grad_norm = float(torch.linalg.vector_norm(self._gradient))
        if not math.isfinite(grad_norm):
            self._gradient.zero_()
            raise EngineRequestError(
                f"the gradient norm is {grad_norm}; the gradients were dropped and no weight has "
                "changed; lower the learning rate or set grad_clip_norm"
            )
        if 0 < settings["grad_clip_norm"] < grad_norm:
            self._gradient.mul_(settings["grad_clip_norm"] / (grad_norm + 1e-6))
        (param_group,) = self._optimizer.param_groups
        param_group.update(
            lr=settings["learning_rate"],
            betas=(settings["beta1"], settings["beta2"]),
            eps=settings["eps"],
            weight_decay=settings["weight_decay"],
        )
        self._optimizer.step()
        self._gradient.zero_()
        return {"grad_norm": grad_norm}

    def copy_optimizer_state(self) -> dict[str, torch.Tensor]:
        """Return Adam's moments and step count, on the CPU."""
        state = self._optimizer.state_dict()["state"].get(0, {})
        return {name: value.cpu().contiguous().clone() for name, value in state.items()}

    def load(
        self,
        factors: lora_layers.Factors,
        optimizer_state: dict[str, torch.Tensor] | None,
        source: str,
    ) -> None:
        """Replace the weights and drop pending gradients.

        With `optimizer_state` Adam continues where it was, without it Adam starts again.

        Raises:
            EngineRequestError: The adapter has other layers or sizes; nothing is changed then.
        """
        if _get_shapes(factors) != _get_shapes(self.factors):
            raise EngineRequestError(
                f"{source} has other layers or another rank than the model, whose rank is "
                f"{self.spec.rank}"
            )
        for path, pair in factors.items():
            for current, new in zip(self.factors[path], pair, strict=True):
                current.data.copy_(new)
        self._gradient.zero_()
        self._optimizer = self._create_optimizer()
        if optimizer_state:
            self._load_optimizer_state(optimizer_state, source)

    def _load_optimizer_state(self, optimizer_state: dict[str, torch.Tensor], source: str) -> None:
        """Load Adam's state; raise EngineRequestError for the state of another engine."""
        if (
            set(optimizer_state) != {"step", "exp_avg", "exp_avg_sq"}
            or optimizer_state["exp_avg"].shape != self._flat_parameters.shape
        ):
            raise EngineRequestError(
                f"{source} has the optimizer state of another engine "
                f"({sorted(optimizer_state)[:3]}); load it without the optimizer"
            )
        self._optimizer.load_state_dict(
            {**self._optimizer.state_dict(), "state": {0: optimizer_state}}
        )


def _parse_adam_params(adam_params: Mapping[str, object]) -> dict[str, float]:
    """Return the numbers of a step with defaults filled in.

    A field of a later SDK is ignored while it is null, 0 or false.

    Raises:
        EngineRequestError: A number would ruin the adapter (JSON has neither NaN nor infinity, so
            they arrive as null), or an unknown field has a value.
    """
    unknown = sorted(
        key for key, value in adam_params.items() if key not in ADAM_DEFAULTS and value
    )
    if unknown:
        raise EngineRequestError(
            f"adam_params has no {', '.join(unknown)}; allowed: {', '.join(sorted(ADAM_DEFAULTS))}"
        )
    settings = dict(ADAM_DEFAULTS)
    for key in set(adam_params) & set(ADAM_DEFAULTS):
        value = adam_params[key]
        upper_bound = 1.0 if key in ("beta1", "beta2") else float("inf")
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 <= value < upper_bound
        ):
            if upper_bound == 1:
                limit = "at least 0 and below 1"
            else:
                limit = "finite and at least 0"
            raise EngineRequestError(
                f"adam_params.{key} is {'not finite' if value is None else repr(value)}; allowed: "
                f"a number, {limit}"
            )
        settings[key] = float(value)
    return settings


def _get_shapes(factors: lora_layers.Factors) -> dict[str, tuple[torch.Size, torch.Size]]:
    return {path: (a.shape, b.shape) for path, (a, b) in factors.items()}
