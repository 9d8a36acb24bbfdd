"""Write the model card of pushed weights: origin, training, and how to load them."""

from pathlib import Path

from lachesis.base.formatting import format_reward
from lachesis.base.json_text import Json
from lachesis.reporting.run_summary import get_model_name
from lachesis.reporting.run_view import RunView
from lachesis.runs.held_out_results import describe_point
from lachesis.runs.record import RunRecord
from lachesis.weight_agreement.parity import Parity

# The settings that a card shows, in order, with the words for them.
SHOWN_SETTINGS = {
    "tinker.learning_rate": "learning rate",
    "tinker.lora_rank": "rank of the adapter",
    "env.group_size": "answers per item",
    "env.max_token_length": "most tokens of an item and its answer",
    "tinker.thinking": "thinking",
    "tinker.chat_template_kwargs": "arguments of the chat template",
    "tinker.stop_tokens": "further tokens that end an answer",
}


def build_model_card(view: RunView, note: Json, repository: str, *, merged: bool) -> str:
    """Return the text of `README.md` of a repository.

    Args:
        view: The run.
        note: The note of the exported checkpoint.
        repository: OWNER/NAME.
        merged: Whether the repository holds the merged model, not the adapter.
    """
    record = view.record
    model = get_model_name(record)
    what = "A model" if merged else "A LoRA adapter"
    origin = f"[{model}](https://huggingface.co/{model})"
    if Path(record.base_model).is_dir():
        origin = f"`{model}`"
    rows = _list_rows(view, note)
    table = [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join(
        [
            _make_metadata(record, model, merged=merged),
            f"# {repository.split('/')[-1]}",
            "",
            f"{what} trained from {origin} by reinforcement learning (GRPO) on the environment "
            f"`{record.environment}`, with Lachesis.",
            "",
            "| | |",
            "|---|---|",
            *table,
            "",
            "Load it in Python:",
            "",
            "```python",
            *_build_loading_code(record.base_model, repository, merged=merged),
            "```",
            "",
        ]
    )


def _make_metadata(record: RunRecord, model: str, *, merged: bool) -> str:
    """Return the card's first lines, which the Hub reads."""
    from huggingface_hub import ModelCardData

    # The Hub knows no folders of this machine.
    base_model = None if Path(record.base_model).is_dir() else model
    data = ModelCardData(
        base_model=base_model,
        library_name="transformers" if merged else "peft",
        pipeline_tag="text-generation",
        tags=["lachesis", "reinforcement-learning", "grpo", "lora", record.environment],
    )
    return f"---\n{data.to_yaml()}\n---"


def _list_rows(view: RunView, note: Json) -> dict[str, str]:
    """Return the rows of the card's table: results, settings, and how the weights were compared."""
    summary = view.summary
    rows = {"step of training": f"{note['step']} of {view.record.total_steps}"}
    if note["reward"] is not None:
        rows["mean reward since the checkpoint before"] = format_reward(note["reward"])
    if summary.held_out_before is not None:
        rows["correct held-out answers before training"] = describe_point(summary.held_out_before)
    evaluated_step = (note["held_out"] or {}).get("step")
    for point in view.curve:
        if point.step == evaluated_step:
            name = f"correct held-out answers, weights of step {point.step}"
            rows[name] = describe_point(point)
    for key, name in SHOWN_SETTINGS.items():
        value = summary.settings.get(key)
        if value not in (None, "default", {}, []):
            rows[name] = str(value)
    rows["compared with the trained model"] = _describe_verification(note)
    return rows


def _describe_verification(note: Json) -> str:
    parity = note.get("parity_merged") or note.get("parity")
    if parity is None:
        return "no"
    checked = Parity.model_validate(parity)
    return f"{checked.verdict}: {checked.describe()}"


def _build_loading_code(base_model: str, repository: str, *, merged: bool) -> list[str]:
    """Return the Python lines that load the weights."""
    if merged:
        return [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            f"model = AutoModelForCausalLM.from_pretrained({repository!r})",
            f"tokenizer = AutoTokenizer.from_pretrained({repository!r})",
        ]
    return [
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        f"base_model = AutoModelForCausalLM.from_pretrained({base_model!r})",
        f"model = PeftModel.from_pretrained(base_model, {repository!r})",
        f"tokenizer = AutoTokenizer.from_pretrained({base_model!r})",
    ]
