"""Train the tiny model on sums by reinforcement without Lachesis, for `bench/time_to_reward.py`.

The model, adapter, batch and learning rate are those of the run that it is compared with:

    python bench/programs/reinforce_loop.py torch MODEL SEED  a loop by hand: sample, score, update
    python bench/programs/reinforce_loop.py trl MODEL SEED    the GRPOTrainer of TRL

The program ends when a batch's mean reward has reached 0.85. It prints the number of steps and the
seconds since the start of the first batch as JSON. With a number of steps as the last argument it
makes so many, whatever the reward, and the seconds are those since the end of the first step.
"""

import json
import random
import sys
import time
from typing import Any

GOAL, MOST_STEPS = 0.85, 400
GROUPS, SAMPLES, NEW = 8, 16, 8
RATE, RANK = 1.5e-3, 32
LARGEST = 9


def make_sums(seed: int) -> list[tuple[str, str]]:
    """The training sums of the environment `arithmetic`, in an order of this seed."""
    numbers = range(LARGEST + 1)
    items = [(f"{a}+{b}=", str(a + b)) for a in numbers for b in numbers]
    random.Random("arithmetic").shuffle(items)
    return random.Random(seed).sample(items[20:], 80)


def train_by_hand(model: str, seed: int, num_steps: int | None) -> tuple[float, int]:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted: Any = get_peft_model(
        base, LoraConfig(r=RANK, lora_alpha=32, target_modules="all-linear")
    )
    optimizer = torch.optim.AdamW(
        (parameter for parameter in adapted.parameters() if parameter.requires_grad),
        RATE,
        (0.9, 0.95),
        1e-8,
        0.0,
    )
    items, started = make_sums(seed), time.perf_counter()
    for step in range(num_steps or MOST_STEPS):
        if step == 1 and num_steps:
            started = time.perf_counter()
        chosen = [items[(step * GROUPS + index) % len(items)] for index in range(GROUPS)]
        prompt_ids = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": q}], add_generation_prompt=True, return_dict=False
            )
            for q, _ in chosen
        ]
        prompt = torch.tensor(prompt_ids).repeat_interleave(SAMPLES, 0)
        ids, tokens, cache = prompt, [], DynamicCache(config=base.config)
        with torch.inference_mode():
            for _ in range(NEW):
                logits = adapted(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1]
                ids = torch.multinomial(torch.softmax(logits, -1), 1)
                tokens.append(ids)
        answers = torch.cat(tokens, 1).clone()
        ended = (answers == tokenizer.eos_token_id).int().cumsum(1)
        learned = (ended - (answers == tokenizer.eos_token_id).int()) == 0
        texts = tokenizer.batch_decode(
            [row[keep] for row, keep in zip(answers, learned, strict=True)],
            skip_special_tokens=True,
        )
        scores = torch.tensor(
            [float(text.strip() == chosen[i // SAMPLES][1]) for i, text in enumerate(texts)]
        )
        if scores.mean() >= GOAL and not num_steps:
            return time.perf_counter() - started, step + 1
        advantages = (
            scores.view(GROUPS, -1) - scores.view(GROUPS, -1).mean(1, keepdim=True)
        ).flatten()
        whole = torch.cat([prompt, answers], 1)
        logits = adapted(input_ids=whole[:, :-1], use_cache=False).logits[:, prompt.shape[1] - 1 :]
        logprobs = torch.log_softmax(logits, -1).gather(2, answers[..., None])[..., 0]
        (-((logprobs - logprobs.detach()).exp() * advantages[:, None] * learned).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    if num_steps:
        return time.perf_counter() - started, num_steps
    raise SystemExit(f"the reward is below {GOAL} after {MOST_STEPS} steps")


def get_text(completion: Any) -> str:
    """Return the text of a completion of TRL, which may be a list of messages."""
    if isinstance(completion, list):
        return str(completion[0]["content"])
    return str(completion)


def train_with_trl(model: str, seed: int, num_steps: int | None) -> tuple[float, int]:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    reached: list[tuple[float, int]] = []
    started = 0.0

    def score(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = map(get_text, completions)
        scores = [float(text.strip() == right) for text, right in zip(texts, answer, strict=True)]
        if sum(scores) / len(scores) >= GOAL and not reached and not num_steps:
            reached.append((time.perf_counter() - started, trainer.state.global_step + 1))
        return scores

    class Until(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            nonlocal started
            started = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            nonlocal started
            if num_steps and state.global_step == 1:
                started = time.perf_counter()
            if state.global_step == num_steps:
                reached.append((time.perf_counter() - started, num_steps))
            control.should_training_stop = bool(reached)

    rows = [
        {"prompt": [{"role": "user", "content": q}], "answer": a} for q, a in make_sums(seed)
    ] * (MOST_STEPS * GROUPS // 80)
    options = GRPOConfig(
        output_dir="unused", use_cpu=True, seed=seed, per_device_train_batch_size=GROUPS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=NEW, temperature=1.0, beta=0.0, learning_rate=RATE,
        lr_scheduler_type="constant", adam_beta2=0.95,
        weight_decay=0.0, max_grad_norm=0.0, max_steps=num_steps or MOST_STEPS,
        scale_rewards="none",
        loss_type="dr_grpo",
        save_strategy="no", report_to="none", logging_strategy="no", disable_tqdm=True, bf16=False,
        gradient_checkpointing=False, shuffle_dataset=False,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    lora = LoraConfig(r=RANK, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = GRPOTrainer(
        model,
        score,
        options,
        Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=[Until()],
    )
    trainer.train()
    if not reached:
        raise SystemExit(f"the reward is below {GOAL} after {MOST_STEPS} steps")
    return reached[0]


def main() -> None:
    kind, model, seed, *rest = sys.argv[1:]
    num_steps = int(rest[0]) if rest else None
    train = {"torch": train_by_hand, "trl": train_with_trl}[kind]
    seconds, steps = train(model, int(seed), num_steps)
    print(json.dumps({"seconds": seconds, "steps": steps}))


if __name__ == "__main__":
    main()
