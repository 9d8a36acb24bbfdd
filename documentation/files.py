"""Describe the files of a home and of a run; a test compares the names with the code."""

from __future__ import annotations

from documentation.markdown import make_table

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
    "policy.yaml": "what agents may start, set and spend, if you write one",
    "profiles.yaml": "an operator's own values of profiles, if you write one",
    "prices.yaml": "your own prices, if you write one",
}
RUN_FILES = {
    "run.json": "the record: state, seed, model, health, attempts, services",
    "config.yaml": "the configuration that all processes of the run read",
    "metrics.jsonl": "one line per step; see [metrics](metrics.md)",
    "rollouts": "every rollout as Parquet: prompt, answer, score, tokens, log-probabilities",
    "checkpoints": "one manifest per checkpoint, with a hash of each of its files",
    "engine": "the adapters and optimizer states of the embedded engine, or of a back end",
    "backend": "the files of a back end while it runs; emptied at each start",
    "backend.json": "what `lachesis backend check` had found about the run's server",
    "downloads": "what was received of a checkpoint whose download has broken off",
    "evaluation": "held-out results before and after training, with the answers",
    "evaluation/failed.jsonl": "one line for each evaluation that failed",
    "logs": "one log per process",
    "provenance.json": "versions, command line, fingerprint of the environment's code",
    "sources": "a copy of the environments' code",
    "spent.json": "tokens and cost when the trainer ended last",
    "server_pause.json": "the last pause of a remote Tinker server, and why",
    "session.json": "the session at a remote Tinker server, while it is open",
    ".alive": "locked while a process of the run lives",
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
