"""Parameters of the deployment `train` that are refused, and what the refusal has to name."""

from dataclasses import dataclass
from typing import Any

ARITHMETIC = {"environment": "arithmetic"}


@dataclass(frozen=True)
class BadInput:
    """One bad input; `by_server` says whether Prefect's server refuses it at the submission."""

    name: str
    parameters: dict[str, Any]
    words: tuple[str, ...]
    by_server: bool = False


BAD_INPUTS = [
    BadInput("no environment", {"steps": 5}, ("environment",), by_server=True),
    BadInput(
        "unknown environment", {"environment": "sums"}, ("sums", "arithmetic"), by_server=True
    ),
    BadInput("number for a name", {"environment": 5}, ("environment", "string"), by_server=True),
    BadInput(
        "unknown profile", {**ARITHMETIC, "profile": "gpu"}, ("gpu", "custom"), by_server=True
    ),
    BadInput("no steps", {**ARITHMETIC, "steps": 0}, ("steps", "1"), by_server=True),
    BadInput(
        "text for steps", {**ARITHMETIC, "steps": "ten"}, ("steps", "integer"), by_server=True
    ),
    BadInput("half a step", {**ARITHMETIC, "steps": 1.5}, ("steps", "integer"), by_server=True),
    BadInput("negative seed", {**ARITHMETIC, "seed": -1}, ("seed", "0"), by_server=True),
    BadInput(
        "word for a switch",
        {**ARITHMETIC, "require_validation": "perhaps"},
        ("require_validation", "boolean"),
        by_server=True,
    ),
    BadInput("unknown limit", {**ARITHMETIC, "limits": {"hours": 1}}, ("hours",), by_server=True),
    BadInput(
        "no hours", {**ARITHMETIC, "limits": {"max_hours": 0}}, ("max_hours", "0"), by_server=True
    ),
    BadInput("unknown parameter", {**ARITHMETIC, "stepz": 5}, ("stepz",), by_server=True),
    BadInput(
        "word for a number",
        {**ARITHMETIC, "settings": "batch_size=many"},
        ("env.batch_size is 'many'", "integer, at least 2"),
    ),
    BadInput(
        "no assignment",
        {**ARITHMETIC, "settings": "batch_size"},
        ("settings, line 1: 'batch_size'", "field=value"),
    ),
    BadInput(
        "unknown field",
        {**ARITHMETIC, "settings": "speed=9"},
        ("no field 'speed'", "fields that can be edited: ", "group_size"),
    ),
    BadInput(
        "locked field",
        {**ARITHMETIC, "settings": "env.rollout_server_url=http://elsewhere"},
        ("env.rollout_server_url is locked", "infrastructure"),
    ),
    BadInput(
        "file of this machine",
        {**ARITHMETIC, "settings": "tinker.sft_file=/etc/passwd", "by_agent": True},
        ("tinker.sft_file is locked", "the owner may choose"),
    ),
    BadInput(
        "missing model",
        {**ARITHMETIC, "model": "/nowhere/model"},
        ("/nowhere/model is not a model", "lachesis model build"),
    ),
    BadInput(
        "unknown checkpoint",
        {**ARITHMETIC, "from_checkpoint": "deadbeef@3"},
        ("no run 'deadbeef'", "existing runs"),
    ),
    BadInput(
        "long name", {**ARITHMETIC, "name": "x" * 61}, ("the name 'xxx", "at most 60 characters")
    ),
    BadInput(
        "missing key",
        {**ARITHMETIC, "profile": "tinker"},
        ("profile tinker needs", "TINKER_API_KEY"),
    ),
    BadInput(
        "missing validation",
        {"environment": "reverse_text", "model": "tiny", "require_validation": True},
        ("never been validated", "run `lachesis test reverse_text --model "),
    ),
]
