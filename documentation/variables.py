"""Describe the environment variables that users set; a test compares the names with the code."""

from __future__ import annotations

from documentation.markdown import make_table

VARIABLES_HEAD = """# Environment variables

For whoever runs `lachesis serve` as a service, or wants another place, port or token: the variables
that are read.

Set them before the command. A server that runs in the background keeps those it was started with.
"""
# Name, default and meaning of each variable, by what it is about.
VARIABLES: dict[str, dict[str, tuple[str, str]]] = {
    "Places": {
        "LACHESIS_HOME": (
            "the user's data folder",
            "The folder of runs, models, tests and logs; see [files](files.md).",
        ),
        "LACHESIS_ENVIRONMENTS": (
            "none",
            "Further folders and files with environments, separated by colons.",
        ),
        "LACHESIS_CHECKOUT": (
            "found by itself",
            "A clone of the repository, whose flows and environments are used in place of those "
            "of the installed package.",
        ),
        "HF_HOME": ("~/.cache/huggingface", "Where models of the Hugging Face Hub are kept."),
    },
    "Training": {
        "LACHESIS_PROFILE": (
            "embedded",
            "The profile of commands and tools that name none: embedded, tinker or custom.",
        ),
        "TINKER_API_KEY": (
            "none",
            "The key of the Tinker cloud, or of another server. A key may also be in Hermes "
            "Agent's file or in the keyring; see [Where the key is](../how-to/tinker.md).",
        ),
        "TINKER_BASE_URL": ("none", "The address of another server that speaks the protocol."),
        "HERMES_HOME": ("~/.hermes", "The folder of Hermes Agent; its file `.env` may hold keys."),
        "OMP_NUM_THREADS": (
            "the number of cores",
            "The largest number of threads of PyTorch. The embedded engine measures which number "
            "up to this one is the fastest; `lachesis model build` takes half of the cores.",
        ),
        "HF_TOKEN": ("none", "The token for models of the Hub that need one."),
        "WANDB_API_KEY": (
            "none",
            "The key with which runs that use W&B log online; without it they log offline.",
        ),
        "LACHESIS_ENVIRONMENT_VARIABLES": (
            "none",
            "Names of variables that environments get, separated by spaces, also with `*`: "
            "`WIKI_DIR SEARCH_*`. Without it they get no key.",
        ),
        "OPENAI_BASE_URL": (
            "OpenRouter",
            "The endpoint whose models `lachesis test --endpoint-model NAME` asks.",
        ),
        "OPENAI_API_KEY": ("none", "Its key, where OPENAI_BASE_URL is set."),
        "OPENROUTER_API_KEY": ("none", "The key of OpenRouter, where it is not."),
    },
    "The server": {
        "LACHESIS_MAX_RUNS": ("4", "Number of trainings that run at the same time."),
        "LACHESIS_MONITOR_INTERVAL_S": (
            "60",
            "Seconds between two looks of the monitor at all runs; at least 15.",
        ),
        "LACHESIS_NIGHTLY": (
            "none",
            "A cron line: environments are validated at that time, as in `0 3 * * *`.",
        ),
        "LACHESIS_NIGHTLY_ENVIRONMENTS": (
            "all",
            "The environments that are validated then, separated by spaces.",
        ),
        "LACHESIS_PAGES_PORT": (
            "8070",
            "The port of the pages that `lachesis serve` serves; 0 serves none.",
        ),
        "LACHESIS_NO_SERVE": (
            "0",
            "With 1, commands and agents' tools start no server where none runs, and say so.",
        ),
        "LACHESIS_SERVER_NAMES": (
            "none",
            "Further names by which browsers may reach the Prefect server, separated by commas.",
        ),
        "LACHESIS_DEPLOYMENT": (
            "chosen by itself",
            "A suffix for the names of the deployments, where several homes share one Prefect "
            "server.",
        ),
        "PREFECT_API_URL": (
            "the server of this home",
            "A Prefect server of your own, which is used in place of ours.",
        ),
        "PREFECT_API_AUTH_STRING": (
            "none",
            "User and password of the Prefect server, as `user:password`.",
        ),
        "PREFECT_SERVER_API_AUTH_STRING": (
            "none",
            "The user and password that the Prefect server of `lachesis serve` asks for; commands "
            "then need them in PREFECT_API_AUTH_STRING.",
        ),
    },
    "Access": {
        "LACHESIS_TOKEN": (
            "a file of the home",
            "The token that the pages, the HTTP service and MCP over HTTP ask for.",
        ),
        "LACHESIS_SESSION": (
            "one per folder",
            "The name of an agent's state: its environment and its draft.",
        ),
        "LACHESIS_STATUS_INTERVAL_S": (
            "1800",
            "Seconds that an agent is asked to wait between two questions for one run's status.",
        ),
    },
}
# Set by this program for its own processes; not for users.
INTERNAL_VARIABLES = (
    "LACHESIS_COUNTERS_FILE",
    "LACHESIS_BACKEND_KEY", "LACHESIS_ENGINE_TOKEN", "LACHESIS_ENVIRONMENT",
    "LACHESIS_INFERENCE_TOKEN", "LACHESIS_INFERENCE_URL", "LACHESIS_LAUNCHER",
    "LACHESIS_POSITION_FILE", "LACHESIS_RUN", "LACHESIS_TRAINED_GROUPS",
)  # fmt: skip


def render_variables() -> str:
    """Return the page of all variables, a table per subject."""
    parts = [VARIABLES_HEAD]
    for subject, variables in VARIABLES.items():
        rows = [(f"`{name}`", *texts) for name, texts in variables.items()]
        parts += [f"## {subject}", "", make_table(("variable", "default", "meaning"), rows), ""]
    return "\n".join(parts)
