"""The work that `bench/engine.py` has every contender do; each does it in a process of its own and
prints its numbers as JSON.

python bench/work.py server URL TOKEN MODEL      through the Tinker SDK of this interpreter, from
0.16 on python bench/work.py torch MODEL                 by hand in torch: one batch, a cache, LoRA
of PEFT python bench/work.py generate MODEL              `transformers`' generate, once per request

Numbers are medians. Sampling: N requests at once, each another prompt of 16 tokens, 32 new tokens
each. Training: forward-backward and update on 32 sequences of 32 to 128 tokens. Nothing here
imports Lachesis.
"""

from __future__ import annotations

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
MOST_TOKEN = 255


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(count)
    return [[draw.randrange(MOST_TOKEN) for _ in range(PROMPT)] for _ in range(count)]


def sequences() -> list[list[int]]:
    draw = random.Random(0)
    return [
        [draw.randrange(MOST_TOKEN) for _ in range(draw.randint(SHORT, LONG))]
        for _ in range(SEQUENCES)
    ]


def median(call: Callable[[], Any], seconds: float = 6.0) -> float:
    """Return the median duration of a call in seconds. A first call does not count, and then at
    least one is made, for about this many seconds.
    """
    call()
    times: list[float] = []
    while not times or (sum(times) < seconds and len(times) < 20):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def through_a_server(url: str, token: str, model: str) -> dict[str, float]:
    import tinker
    from tinker import types

    service = tinker.ServiceClient(base_url=url, api_key=token)
    training = service.create_lora_training_client(base_model=model, rank=RANK)
    training = training.result() if hasattr(training, "result") else training

    def publish(number: int) -> Any:
        future = training.save_weights_and_get_sampling_client(name=f"bench-{number}")
        return future.result() if hasattr(future, "result") else future

    def sample(sampler: Any, count: int, samples: int = 1, new: int = NEW) -> None:
        params = types.SamplingParams(
            max_tokens=new, temperature=1.0, stop=[MOST_TOKEN + 1]
        )  # a token that is next to never drawn
        waiting = [
            sampler.sample(
                prompt=types.ModelInput.from_ints(prompt),
                num_samples=samples,
                sampling_params=params,
            )
            for prompt in prompts(count)
        ]
        for future in waiting:
            future.result()

    def datum(tokens: list[int]) -> Any:
        import numpy as np

        weights = np.ones(len(tokens) - 1, np.float32)
        inputs = {"target_tokens": np.array(tokens[1:], np.int64), "weights": weights}
        tensors = {key: types.TensorData.from_numpy(value) for key, value in inputs.items()}
        return types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=tensors
        )

    data = [datum(tokens) for tokens in sequences()]

    def step() -> None:
        forward = training.forward_backward(data, "cross_entropy")
        update = training.optim_step(types.AdamParams(learning_rate=1e-6))
        forward.result()
        update.result()

    sampler = publish(0)
    sample(sampler, 1)
    rates = {
        f"sample {count}": count * NEW / median(lambda count=count: sample(sampler, count))
        for count in AT_ONCE
    }
    rates[f"sample {GROUPS}x{SAMPLES}"] = (
        GROUPS * SAMPLES * NEW / median(lambda: sample(sampler, GROUPS, SAMPLES))
    )
    rates["train"] = sum(map(len, sequences())) / median(step)
    first = median(lambda: sample(sampler, 1, new=1), 1.0)
    swaps = []
    for number in range(1, 6):
        step()
        started = time.perf_counter()
        sample(publish(number), 1, new=1)
        swaps.append(time.perf_counter() - started - first)
    return {**rates, "swap": statistics.median(swaps)}


def by_hand(model: str) -> dict[str, float]:
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
        ids = torch.tensor(prompts(count))
        rates[f"sample {count}"] = count * NEW / median(lambda ids=ids: sample(ids))
    ids = torch.tensor(prompts(GROUPS)).repeat_interleave(SAMPLES, 0)
    rates[f"sample {GROUPS}x{SAMPLES}"] = GROUPS * SAMPLES * NEW / median(lambda: sample(ids))
    adapted = get_peft_model(module, LoraConfig(r=RANK, lora_alpha=32, target_modules="all-linear"))
    parameters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-6)
    longest = max(map(len, sequences()))
    tokens = torch.tensor([sequence + [0] * (longest - len(sequence)) for sequence in sequences()])
    mask = torch.tensor(
        [[1] * len(sequence) + [0] * (longest - len(sequence)) for sequence in sequences()]
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

    return {**rates, "train": sum(map(len, sequences())) / median(step)}


def by_generate(model: str) -> dict[str, float]:
    import torch
    from transformers import AutoModelForCausalLM

    module: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    module.generation_config.eos_token_id = None

    def sample(count: int, samples: int = 1) -> None:
        for prompt in prompts(count):
            module.generate(
                torch.tensor([prompt]), do_sample=True, top_k=0, num_return_sequences=samples,
                max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0,
            )  # fmt: skip

    # One call after the other: 128 of them take eight times as long as 16.
    rates = {
        f"sample {count}": min(16, count) * NEW / median(lambda count=count: sample(min(16, count)))
        for count in AT_ONCE
    }
    return {
        **rates,
        f"sample {GROUPS}x{SAMPLES}": GROUPS
        * SAMPLES
        * NEW
        / median(lambda: sample(GROUPS, SAMPLES)),
    }


def main() -> None:
    kind, *rest = sys.argv[1:]
    rates = {"server": through_a_server, "torch": by_hand, "generate": by_generate}[kind](*rest)
    rates["memory of this process"] = (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    )
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
