"""Sample and train in one of three ways, and print the speeds as JSON.

`bench/engine_speed.py` starts this program once per contender, each in a process of its own:

    sample_and_train.py server URL TOKEN MODEL   by this interpreter's Tinker SDK (>= 0.16)
    sample_and_train.py torch MODEL              by hand in torch: one batch, a cache, PEFT's LoRA
    sample_and_train.py generate MODEL           with `generate` of transformers, per request

The numbers are medians. Sampling sends N requests at once, each with its own prompt of 16 tokens
and 32 new tokens. Training is a forward and backward pass and an update on 32 sequences of 32 to
128 tokens. Nothing here imports Lachesis.
"""

import json
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

AT_ONCE = (1, 16, 128)
PROMPT, NEW = 16, 32
GROUPS, SAMPLES = 8, 16
SEQUENCES, SHORT, LONG = 32, 32, 128
RANK = 32
MAX_TOKEN = 255


def make_prompts(count: int) -> list[list[int]]:
    draw = random.Random(count)
    return [[draw.randrange(MAX_TOKEN) for _ in range(PROMPT)] for _ in range(count)]


def make_sequences() -> list[list[int]]:
    draw = random.Random(0)
    return [
        [draw.randrange(MAX_TOKEN) for _ in range(draw.randint(SHORT, LONG))]
        for _ in range(SEQUENCES)
    ]


def measure_median_s(call: Callable[[], Any], seconds: float = 6.0) -> float:
    """Return the median duration of a call in seconds.

    A first call is not counted. At least one more follows, and up to 20 within about `seconds`.
    """
    call()
    times: list[float] = []
    while not times or (sum(times) < seconds and len(times) < 20):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


class SdkClient:
    """A training client and its samplers at a server that speaks the Tinker API."""

    def __init__(self, url: str, token: str, model: str) -> None:
        import tinker

        service = tinker.ServiceClient(base_url=url, api_key=token)
        self.training: Any = _wait_for(
            service.create_lora_training_client(base_model=model, rank=RANK)
        )
        self.data = [_make_datum(tokens) for tokens in make_sequences()]

    def publish_weights(self, number: int) -> Any:
        """Save the present weights, and return a client that samples from them."""
        name = f"bench-{number}"
        return _wait_for(self.training.save_weights_and_get_sampling_client(name=name))

    def train_step(self) -> None:
        """Take one step on all sequences."""
        from tinker import types

        forward = self.training.forward_backward(self.data, "cross_entropy")
        update = self.training.optim_step(types.AdamParams(learning_rate=1e-6))
        forward.result()
        update.result()


def sample(sampler: Any, count: int, samples: int = 1, new_tokens: int = NEW) -> None:
    """Sample `samples` answers to each of `count` prompts, with all requests under way at once."""
    from tinker import types

    # The stop token is one that is almost never drawn, so that answers have their full length.
    params = types.SamplingParams(max_tokens=new_tokens, temperature=1.0, stop=[MAX_TOKEN + 1])
    futures = [
        sampler.sample(
            prompt=types.ModelInput.from_ints(prompt), num_samples=samples, sampling_params=params
        )
        for prompt in make_prompts(count)
    ]
    for future in futures:
        future.result()


def measure_server(url: str, token: str, model: str) -> dict[str, float]:
    """Return the speeds of a Tinker server, and the seconds until new weights are sampled from."""
    client = SdkClient(url, token, model)
    sampler = client.publish_weights(0)
    sample(sampler, 1)
    rates = {
        f"sample {count}": count
        * NEW
        / measure_median_s(lambda count=count: sample(sampler, count))
        for count in AT_ONCE
    }
    group_s = measure_median_s(lambda: sample(sampler, GROUPS, SAMPLES))
    rates[f"sample {GROUPS}x{SAMPLES}"] = GROUPS * SAMPLES * NEW / group_s
    rates["train"] = sum(map(len, make_sequences())) / measure_median_s(client.train_step)
    first_token_s = measure_median_s(lambda: sample(sampler, 1, new_tokens=1), 1.0)
    swaps = []
    for number in range(1, 6):
        client.train_step()
        started = time.perf_counter()
        sample(client.publish_weights(number), 1, new_tokens=1)
        swaps.append(time.perf_counter() - started - first_token_s)
    return {**rates, "swap": statistics.median(swaps)}


def _wait_for(answer: Any) -> Any:
    """Return the result of a future; some releases of the SDK return the result itself."""
    return answer.result() if hasattr(answer, "result") else answer


def _make_datum(tokens: list[int]) -> Any:
    import numpy as np
    from tinker import types

    weights = np.ones(len(tokens) - 1, np.float32)
    inputs = {"target_tokens": np.array(tokens[1:], np.int64), "weights": weights}
    tensors = {key: types.TensorData.from_numpy(value) for key, value in inputs.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=tensors)


def measure_torch(model: str) -> dict[str, float]:
    """Return the speeds of a loop by hand in torch, with a cache and PEFT's LoRA."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, DynamicCache

    module: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    @torch.inference_mode()
    def sample(ids: Any) -> None:
        cache = DynamicCache(config=module.config)
        logprobs = []
        for _ in range(NEW):
            logits = module(
                input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1
            ).logits[:, -1]
            shares = torch.log_softmax(logits, -1)
            ids = torch.multinomial(shares.exp(), 1)
            logprobs.append(shares.gather(1, ids))
        torch.cat(logprobs, 1).tolist()

    rates = {}
    for count in AT_ONCE:
        ids = torch.tensor(make_prompts(count))
        rates[f"sample {count}"] = count * NEW / measure_median_s(lambda ids=ids: sample(ids))
    ids = torch.tensor(make_prompts(GROUPS)).repeat_interleave(SAMPLES, 0)
    rates[f"sample {GROUPS}x{SAMPLES}"] = (
        GROUPS * SAMPLES * NEW / measure_median_s(lambda: sample(ids))
    )
    adapted = get_peft_model(module, LoraConfig(r=RANK, lora_alpha=32, target_modules="all-linear"))
    parameters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-6)
    longest = max(map(len, make_sequences()))
    tokens = torch.tensor(
        [sequence + [0] * (longest - len(sequence)) for sequence in make_sequences()]
    )
    mask = torch.tensor(
        [[1] * len(sequence) + [0] * (longest - len(sequence)) for sequence in make_sequences()]
    )

    def step() -> None:
        logits = adapted(
            input_ids=tokens[:, :-1], attention_mask=mask[:, :-1], use_cache=False
        ).logits
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        )
        (losses * mask[:, 1:].flatten()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return {**rates, "train": sum(map(len, make_sequences())) / measure_median_s(step)}


def measure_generate(model: str) -> dict[str, float]:
    """Return the sampling speeds of `generate` of transformers, one request after another."""
    import torch
    from transformers import AutoModelForCausalLM

    module: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    module.generation_config.eos_token_id = None

    def sample(count: int, samples: int = 1) -> None:
        for prompt in make_prompts(count):
            module.generate(
                torch.tensor([prompt]), do_sample=True, top_k=0, num_return_sequences=samples,
                max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0,
            )  # fmt: skip

    # One call after the other: 128 of them take eight times as long as 16.
    rates = {
        f"sample {count}": min(16, count)
        * NEW
        / measure_median_s(lambda count=count: sample(min(16, count)))
        for count in AT_ONCE
    }
    group_s = measure_median_s(lambda: sample(GROUPS, SAMPLES))
    return {**rates, f"sample {GROUPS}x{SAMPLES}": GROUPS * SAMPLES * NEW / group_s}


def main() -> None:
    kind, *rest = sys.argv[1:]
    rates = {"server": measure_server, "torch": measure_torch, "generate": measure_generate}[kind](
        *rest
    )
    rates["memory of this process"] = (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    )
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
