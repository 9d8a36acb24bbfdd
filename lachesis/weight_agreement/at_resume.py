"""Compare a checkpoint with the trained weights by the server's own sampler.

That is for a base model whose weights are not on this machine, as one of a cloud: nobody wants to
download sixteen gigabytes in order to compare an adapter. The server computes the log-probabilities
of the checkpoint's texts once more, and those of the base model.
"""

from collections.abc import Sequence

from lachesis.base.errors import CheckpointError
from lachesis.base.tinker_client import open_service_client, wait_for_sdk
from lachesis.weight_agreement.logprob_gap import Tolerance
from lachesis.weight_agreement.parity import Parity, Texts, build_parity


def check_on_server(
    base_model: str, sampler_weights: str, texts: Texts, tolerance: Tolerance
) -> Parity:
    """Return how far the checkpoint's log-probabilities are from those of the trained weights.

    Args:
        base_model: The name of the base model at the server.
        sampler_weights: The `tinker://` path of the checkpoint.
        texts: Texts with the log-probabilities that the trained weights gave.
        tolerance: The difference that is allowed.

    Raises:
        CheckpointError: There is no text to compare, or the server refuses.
    """
    import tinker

    if not any(logprobs for _, logprobs in texts):
        raise CheckpointError("the checkpoint has no text to compare with; it cannot be verified")
    try:
        with open_service_client() as service_client:
            create = service_client.create_sampling_client
            trained = wait_for_sdk(create(model_path=sampler_weights))
            base = wait_for_sdk(create(base_model=base_model))
            differences = _compute_differences(trained, texts)
            base_differences = _compute_differences(base, texts)
    except (tinker.TinkerError, ValueError) as error:
        raise CheckpointError(
            f"{sampler_weights} cannot be compared by its server: {error}"
        ) from error
    base_mean = sum(base_differences) / len(base_differences)
    return build_parity(differences, base_mean, texts, tolerance)


def _compute_differences(client: object, texts: Texts) -> list[float]:
    """Return the absolute difference, in nats, of each token but the first of each text."""
    import tinker

    assert isinstance(client, tinker.SamplingClient)
    answers = [client.compute_logprobs(tinker.ModelInput.from_ints(ids)) for ids, _ in texts]
    return [
        abs(float(value or 0.0) - expected)
        for answer, (_, logprobs) in zip(answers, texts, strict=True)
        for value, expected in zip(_skip_first(answer.result()), logprobs, strict=True)
    ]


def _skip_first(values: Sequence[float | None]) -> Sequence[float | None]:
    return values[1:]  # The first token has no log-probability.
