"""Convert batches into the data types of the Tinker SDK."""

from collections.abc import Sequence

import numpy as np
import tinker

from lachesis.base.arrays import Array
from lachesis.trainer.batch.group_to_datums import Batch, Datum
from lachesis.trainer.sft_examples import SftExample


def to_data(batch: Batch, loss_fn: str) -> list[tinker.Datum]:
    """Convert a batch; for a million tokens this takes a fifth of a second."""
    data = [
        make_datum(datum.tokens, targets=datum.targets, **_get_sampling_inputs(datum))
        for datum in batch.datums
    ]
    if loss_fn == "gspo":
        for datum, source_datum in zip(data, batch.datums, strict=True):
            datum.loss_fn_inputs["sequence_ratio_mask"] = _to_tensor(
                source_datum.loss_mask.astype(np.float32)
            )
    return data


def to_sft_data(examples: Sequence[SftExample]) -> list[tinker.Datum]:
    """Convert examples for one supervised step, in which every trained token counts the same."""
    num_trained_tokens = sum(int(example.loss_mask.sum()) for example in examples)
    return [
        make_datum(
            example.tokens,
            targets=example.targets,
            weights=(example.loss_mask / num_trained_tokens).astype(np.float32),
        )
        for example in examples
    ]


def to_prompts(batch: Batch) -> list[tinker.ModelInput]:
    """Return the whole sequence of each datum."""
    return [
        tinker.ModelInput.from_ints([*datum.tokens.tolist(), int(datum.targets[-1])])
        for datum in batch.datums
    ]


def _get_sampling_inputs(datum: Datum) -> dict[str, Array]:
    return {"logprobs": datum.logprobs, "advantages": datum.advantages}


def make_datum(tokens: Array, *, targets: Array, **inputs: Array) -> tinker.Datum:
    """Return a datum with these targets and loss inputs."""
    tensors = {
        "target_tokens": _to_tensor(targets),
        **{name: _to_tensor(value) for name, value in inputs.items()},
    }
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens.tolist()), loss_fn_inputs=tensors
    )


def _to_tensor(values: Array) -> tinker.TensorData:
    return tinker.TensorData.from_numpy(values)
