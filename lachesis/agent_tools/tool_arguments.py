"""Define the arguments that several tools share or that take many lines."""

from typing import Annotated, Any, Literal

from pydantic import Field

RunId = Annotated[
    str,
    Field(
        max_length=100,
        description="Eight hexadecimal digits, as returned by rl_start_training and rl_list_runs",
    ),
]
SelectedProfile = Annotated[
    str | None,
    Field(
        max_length=100,
        description="Where to train: embedded (this machine), tinker (paid cloud) or custom",
    ),
]
SelectedModel = Annotated[
    str | None,
    Field(
        max_length=1000,
        description="Base model: a Hugging Face name, a folder or `tiny`; by default the profile's",
    ),
]
ResumedRun = Annotated[
    str | None,
    Field(
        max_length=100,
        description="An ended run to continue, from its newest checkpoint if there is one",
    ),
]
FromCheckpoint = Annotated[
    str | None,
    Field(
        max_length=100,
        description="RUN, RUN@STEP or RUN@best: start with that checkpoint's weights and optimizer",
    ),
]
NewLimits = Annotated[
    dict[str, Any] | None,
    Field(
        max_length=10,
        description='With resume: new limits, as in {"max_tokens": 500000}, if one was reached',
    ),
]
TestedModels = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=500)]] | None,
    Field(
        min_length=1,
        max_length=10,
        description="`embedded:NAME_OR_FOLDER`, `embedded:tiny`, `tinker:NAME`, or names at the "
        "endpoint; by default the model that would be trained",
    ),
]
TestPrompts = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=20_000)]] | None,
    Field(
        min_length=1,
        max_length=50,
        description="Your own prompts, answered and scored instead of the environment's items",
    ),
]
IdempotencyKey = Annotated[
    str | None, Field(min_length=1, max_length=200, description="The same key returns the same run")
]
Confirm = Annotated[
    Annotated[bool, Field(strict=True)] | Annotated[str, Field(strict=True, max_length=100)],
    Field(
        description="Agrees to the preview with this fingerprint; true agrees to the last preview, "
        "if nothing has changed since. Anything else gives a new preview"
    ),
]
RequireValidation = Annotated[
    bool,
    Field(
        description="Refuse unless a test of this code, at most seven days old, found it learnable"
    ),
]
CreateFile = Annotated[
    bool,
    Field(
        description="Create a working file of that name from the template first, for you to change"
    ),
]
InstallRequirements = Annotated[
    bool, Field(description="Install the requirements in the header of the file first (PEP 723)")
]
AnsweringModel = Annotated[
    str | None,
    Field(
        max_length=1000, description="A folder with the model that answers; by default the tiny one"
    ),
]
RolloutStep = Annotated[int | None, Field(ge=-1, description="One step only; -1 is the last")]
RolloutOrder = Annotated[
    Literal["worst", "best", "first", "invalid"],
    Field(description="By score, as they came, or those that could not be scored or trained on"),
]
Cursor = Annotated[
    int, Field(ge=0, le=1_000_000, description="`next_cursor` of the answer before, or 0")
]
RolloutItem = Annotated[
    str | None,
    Field(max_length=1000, description="One item: its item_key, or a part of the prompt"),
]
