"""Make the reference tables: errors, fields, files, metrics and variables."""

import builtins
import json
from itertools import groupby

from docs_generator.markdown import make_table, take_first_sentence
from lachesis.base.errors import LachesisError, RunError
from lachesis.config.field_edits import SECTIONS, ConfigField, ConfigFields
from lachesis.config.profiles import PROFILES
from lachesis.config.value_parsing import describe_allowed
from lachesis.runs.end_causes import CAUSES
from lachesis.runs.metric_names import METRIC_MEANINGS

ERRORS_HEAD = """# Errors

For whoever writes a program that calls Lachesis: the codes to match on.

A command with `--json`, a tool and a route answer an error as `{"error": MESSAGE, "code": CODE}`,
some with further keys such as `available`. Errors that no program would tell apart have one code.
The message says what happened, the value, what is
allowed and the next step; it may be worded better in a later release, and the code stays.
[Troubleshooting](../troubleshooting.md) says for each code why it comes and what to do. From
Python, `LachesisError` catches all of them; some are also an error of Python, which the last column
names.
"""


def list_error_classes() -> list[type[LachesisError]]:
    """Return all errors, each after the one that it is a kind of, without those that are never
    raised themselves.
    """

    def walk(error: type[LachesisError]) -> list[type[LachesisError]]:
        return [error, *(kind for child in error.__subclasses__() for kind in walk(child))]

    own = [error for error in walk(LachesisError) if error.__module__.startswith("lachesis.base")]
    return [error for error in own if error is not RunError]


def render_errors() -> str:
    """Return the page of all errors as one table."""
    rows = [
        (
            f"[`{error.code}`](../troubleshooting.md#{error.code})",
            take_first_sentence(error.__doc__),
            f"`{error.__name__}`",
            ", ".join(f"`{name}`" for name in _list_python_names(error)),
        )
        for error in list_error_classes()
    ]
    table = make_table(("code", "what happened", "class", "also"), rows)
    return f"{ERRORS_HEAD}\n{table}\n"


def _list_python_names(error: type[LachesisError]) -> list[str]:
    """Return the errors of Python that this one is too, without those that all are."""
    names = [base.__name__ for base in error.__bases__ if base.__module__ == builtins.__name__]
    return [name for name in names if name != "Exception"]


FIELDS_HEAD = """# Fields of a configuration

For whoever sets a value with `--set`, in a launch file, by a form of Prefect or by a tool: each
field with its default, what it may be, and what it means.

`--set batch_size=64` sets a field by its name; `--set env.batch_size=64` also names its section. An
environment has further fields of its own; `lachesis env show NAME` shows them. `lachesis config
NAME` writes a launch file with all fields. *Locked* says where a field cannot be changed: some
fields belong to the machinery, and some cost money or need experience and are locked on the profile
`tinker`, where an operator may unlock them.

Where a profile has a default of its own, it stands beside the general one.
"""
TITLES = {
    "env": "The section `env`: what is sampled",
    "tinker": "The section `tinker`: how it is trained",
    "openai": "The section `openai`: where environments sample from",
    "limits": "The section `limits`: budgets, and what happens when something goes wrong",
    "rollouts": "The section `rollouts`: which rollouts are kept",
}


ENDS_HEAD = """# How a run ends

For whoever reads the end of a run, or writes a program that does: every cause, once.

`run.json` holds the cause of the last attempt as `end_cause`, and of an attempt that has not ended
but was asked to as `stop_cause`. A run ends once in each attempt, for the first cause that was
recorded. If more is known than the sentence below, it takes its place in `error`.
"""
NEXT_STEPS = {
    "resume": "yes",
    "raise_budget": "with a higher budget",
    "check": "after the environment is mended",
    "": "no",
}


def render_ends() -> str:
    """Return the page of all causes for which a run ends."""
    rows = [
        (
            f"`{cause}`",
            rule.status,
            rule.sentence,
            rule.prefect_state or "none",
            "yes" if rule.is_crash else "no",
            NEXT_STEPS[rule.next_step],
        )
        for cause, rule in CAUSES.items()
    ]
    titles = ("cause", "status", "what a person sees", "in Prefect", "`on_crash` acts", "resume")
    return f"{ENDS_HEAD}\n{make_table(titles, rows)}\n"


def render_fields() -> str:
    """Return the page of all fields, a table per section."""
    # The embedded profile locks least, the Tinker cloud most.
    locked_by_profile = {name: ConfigFields(name).by_name for name in ("embedded", "tinker")}
    parts = [FIELDS_HEAD]
    for section in SECTIONS:
        names = [name for name in locked_by_profile["tinker"] if name.startswith(f"{section}.")]
        rows = [
            _make_row(locked_by_profile["embedded"][name], locked_by_profile["tinker"][name])
            for name in names
        ]
        titles = ("field", "default", "allowed", "meaning", "locked")
        parts += [f"## {TITLES[section]}", "", make_table(titles, rows), ""]
    return "\n".join(parts)


def _make_row(field: ConfigField, on_tinker: ConfigField) -> tuple[str, ...]:
    if field.lock_reason:
        locked = "always"
    else:
        locked = "on `tinker`" if on_tinker.lock_reason else ""
    default = f"`{_format_value(field.default)}`"
    for name, profile in PROFILES.items():
        value = profile.values.get(field.section, {}).get(field.name, field.default)
        if value != field.default:
            default += f"; `{_format_value(value)}` on `{name}`"
    allowed = describe_allowed(field.schema)
    return f"`{field.name}`", default, allowed, field.description, locked


def _format_value(value: object) -> str:
    return str(value) if isinstance(value, str | float) else json.dumps(value)


FILES_HEAD = """# Files

For whoever wants to read, copy or back up what Lachesis keeps: the files of a home and of a run.

The home is `$LACHESIS_HOME`, by default the user's data folder (`~/.local/share/lachesis` on
Linux). Everything in it can be copied while nothing runs. Files that others could misuse, such as
the token, are readable by you alone.
"""
HOME_FILES = {
    "runs/RUN/": "one folder per run",
    "inference_tests/TEST/": "what models answered in a test, and how it was scored",
    "sessions/": "what agents have chosen",
    "models/": "the tiny models that `lachesis model build` has made",
    "environments/": "your own environments, where you put some there",
    "checks/": "what `lachesis env check` of an agent has found",
    "backends/": "environments of back ends, and in `checks/` what servers were found to mean",
    "cache/": "what environments were found to contain, so that a list is fast",
    "prefect/": "the database of the Prefect server",
    "logs/": "the logs of server, runner and pages",
    "token": "the token of the home; `$LACHESIS_TOKEN` has priority",
    "ui.json": "where the pages are served, while they are",
    "launcher.lock": "locked while `lachesis serve` runs",
    "spending.jsonl": "what runs and tests were promised and have spent, also removed ones",
    "policy.yaml": "what agents may start, set and spend, if you write one",
    "profiles.yaml": "an operator's own values of profiles, if you write one",
    "prices.yaml": "your own prices, if you write one",
}
RUN_FILES = {
    "run.json": "the record: state, seed, model, health, attempts, services",
    "config.yaml": "the configuration that was asked for; it is never rewritten",
    "attempts": "a folder per attempt: where it ran (`plan.json`), and the configuration that its "
    "processes were given (`config.yaml`)",
    "metrics.jsonl": "one line per step; see [metrics](metrics.md)",
    "rollouts": "every rollout as Parquet: prompt, answer, score, tokens, log-probabilities",
    "checkpoints": "one manifest per checkpoint, with a hash of each of its files",
    "engine": "the adapters and optimizer states of the embedded engine, or of a back end",
    "backend": "the files of a back end while it runs; emptied at each start",
    "backend.json": "what `lachesis backend check` had found about the run's server",
    "downloads": "what was received of a checkpoint whose download has broken off",
    "evaluation": "answers to held-out items: of the base model, of step 0 and of the newest step",
    "evaluation/failed.jsonl": "one line for each evaluation that failed",
    "logs": "one log per process",
    "provenance.json": "versions, command line, fingerprint of the environment's code",
    "sources": "a copy of the environments' code",
    "spent.json": "tokens and cost when the trainer ended last",
    "server_pause.json": "the last pause of a remote Tinker server, and why",
    "session.json": "the session at a remote Tinker server, while it is open",
    ".alive": "locked while a process of the run lives; its time is the last sign of life",
    "stop": "there after a stop that was asked for without a server",
    ".now": "there while a stop without a checkpoint is asked for",
}


def render_files() -> str:
    """Return the page of all files."""
    tables = [
        (title, make_table(("file", "what it holds"), _make_rows(files)))
        for title, files in (("The home", HOME_FILES), ("A run", RUN_FILES))
    ]
    return FILES_HEAD + "".join(f"\n## {title}\n\n{table}\n" for title, table in tables)


def _make_rows(files: dict[str, str]) -> list[tuple[str, str]]:
    return [(f"`{name}`", text) for name, text in files.items()]


METRICS_HEAD = """# Metrics

For whoever reads a curve, `metrics.jsonl`, or W&B: what each number means, and its unit.

A run writes one line per step. A step may stand in the file twice, because a resumed run makes the
steps after its checkpoint again and a late evaluation adds its result in a further line; the last
line of a step counts. `lachesis metrics RUN --csv` prints each step once. `NAME` stands for a name
that the environment or the server chooses.
"""


def render_metrics() -> str:
    """Return the page of all metrics, a table per first part of their names."""
    parts = [METRICS_HEAD]
    by_part = groupby(METRIC_MEANINGS.items(), key=lambda item: item[0].partition("/")[0])
    for part, items in by_part:
        rows = [(f"`{name}`", meaning) for name, meaning in items]
        parts += [f"## {part}", "", make_table(("metric", "meaning"), rows), ""]
    return "\n".join(parts)


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
    "LACHESIS_PARENT_PIPE",
    "LACHESIS_COUNTERS_FILE", "LACHESIS_EVALUATION_FOLDER",
    "LACHESIS_BACKEND_KEY", "LACHESIS_ENGINE_TOKEN", "LACHESIS_ENVIRONMENT",
    "LACHESIS_INFERENCE_TOKEN", "LACHESIS_INFERENCE_URL", "LACHESIS_LAUNCHER",
    "LACHESIS_POSITION_FILE", "LACHESIS_RUN", "LACHESIS_TEMPLATE_SETTINGS",
    "LACHESIS_TRAINED_GROUPS",
)  # fmt: skip


def render_variables() -> str:
    """Return the page of all variables, a table per subject."""
    parts = [VARIABLES_HEAD]
    for subject, variables in VARIABLES.items():
        rows = [(f"`{name}`", *texts) for name, texts in variables.items()]
        parts += [f"## {subject}", "", make_table(("variable", "default", "meaning"), rows), ""]
    return "\n".join(parts)
