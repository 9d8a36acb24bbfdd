"""Run `lachesis backend`: find out whether the trainer can use a Tinker server, or install one."""

from __future__ import annotations

import argparse
import json
import os

from rich.console import Group, RenderableType
from rich.text import Text

from lachesis.base.api_keys import read_key
from lachesis.base.errors import ConfigError
from lachesis.base.files import make_private_folder, storage_errors, write_private
from lachesis.base.json_text import Json
from lachesis.base.timestamps import now_iso
from lachesis.base.tinker_client import get_base_url, request_tinker
from lachesis.cli import console
from lachesis.cli.backend_install import handle_backend_install
from lachesis.cli.console import print_answer
from lachesis.cli.layout import make_pairs_table
from lachesis.config.backends import get_check_file
from lachesis.config.profiles import adopt_profile_keys

COLORS = {"as Tinker": "green", "differs": "red", "fails": "red", "not determined": "yellow"}


def handle_backend(args: argparse.Namespace) -> int:
    """Check a server, or install one."""
    if args.action == "install":
        return handle_backend_install(args)
    return _check(args)


def _check(args: argparse.Namespace) -> int:
    """Ask a server the questions of all probes; return 1 if the trainer cannot use it."""
    if args.target:
        os.environ["TINKER_BASE_URL"] = args.target
    adopt_profile_keys("tinker")
    model = _choose_model(args.model)
    probe_results = {"checked_at": now_iso(), **_run_probes(args, model)}
    answer = {"url": get_base_url(), "model": model, **probe_results}
    file = get_check_file(get_base_url())
    with storage_errors(file):
        make_private_folder(file.parent)
        write_private(file, json.dumps(answer, indent=2))
    print_answer(args, answer, _render(answer))
    return int(answer["verdict"].startswith("does not fit"))


def _choose_model(name: str | None) -> str:
    """Return the model to probe with: the one that was named, or the first that can be trained.

    Raises:
        ConfigError: The server does not offer it.
    """
    content = request_tinker("GET", "get_server_capabilities", read_key("TINKER_API_KEY"))
    entries = content.get("supported_models") or []
    names = [str(entry["model_name"]) for entry in entries if entry.get("trainable") is not False]
    if not names or (name and name not in names):
        raise ConfigError(
            f"the server at {get_base_url()} does not offer {name or 'any model'} for training; "
            f"it offers {', '.join(names[:8]) or 'none'}"
        )
    return name or names[0]


def _run_probes(args: argparse.Namespace, model: str) -> Json:
    # The SDK takes seconds to load.
    from lachesis.tinker_conformance.session import open_backend_session
    from lachesis.tinker_conformance.weight_probes import PROBES, describe_verdict

    findings = {}
    with open_backend_session(model) as session:
        for probe in PROBES:
            if not args.json:
                console.print_note(f"{probe.name}: {probe.question}")
            findings[probe.name] = probe.run(session)
    rows = [
        {
            "probe": probe.name,
            "question": probe.question,
            "needed": probe.is_needed,
            "outcome": findings[probe.name].outcome,
            "finding": findings[probe.name].text,
        }
        for probe in PROBES
    ]
    return {"verdict": describe_verdict(findings), "probes": rows}


def _render(answer: Json) -> RenderableType:
    rows: list[tuple[str | Text, str | Text]] = [
        ("server", answer["url"]),
        ("model", answer["model"]),
    ]
    for row in answer["probes"]:
        mark = Text(row["outcome"], style=COLORS[row["outcome"]])
        rows.append((row["probe"], Text.assemble(mark, f": {row['finding']}")))
    rows.append(("verdict", answer["verdict"]))
    return Group(make_pairs_table(rows))
