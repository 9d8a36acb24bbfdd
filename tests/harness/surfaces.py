"""Ask each surface about a run, and read from its words what it says of it.

A surface makes `Claims`: the fact by name, and its value as it is written there. Numbers stay text,
because a surface may write fewer digits than another one.
"""

import csv
import html
import io
import json
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from lachesis.agent_tools import http_routes
from lachesis.agent_tools.session import AgentSession
from lachesis.agent_tools.tools import TOOLS, CallContext
from lachesis.base.json_text import Json
from lachesis.checkpoints.manifests import Checkpoints
from lachesis.cli import terminal
from lachesis.cli.main import main
from lachesis.monitor import prefect_artifacts
from lachesis.operations.runs import view_run
from lachesis.reporting.model_card import build_model_card
from lachesis.runs.store import RunStore
from lachesis.web.app import create_app

Claims = dict[str, Any]
NUMBER = r"[−-]?[\d,.]*\d(?:e-?\d+)?"
TIME = r"(?:s|min|h|d)"
SHARE = rf"(?P<{{0}}_share>{NUMBER})(?: \((?:(?P<{{0}}_items>[\d,]+) items, 95 % interval )?"
SHARE += rf"(?P<{{0}}_low>{NUMBER})(?: to |–)(?P<{{0}}_high>{NUMBER})\))?"


class Surfaces:
    """All surfaces of one home."""

    def __init__(self, store: RunStore, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.folder, self.monkeypatch = store, folder, monkeypatch
        self.pages = TestClient(create_app(store=store), base_url="http://127.0.0.1:8070")
        self.routes = TestClient(http_routes.create_app(), base_url="http://localhost:8080")

    def ask(self, surface: str, run_id: str) -> Claims:
        """Return what a surface says of a run."""
        return SURFACES[surface](self, run_id)

    def run_command(self, *words: str) -> str:
        """Return what a command prints."""
        output = io.StringIO()
        # Not `file`, whose value before is the stdout of this test.
        self.monkeypatch.setattr(terminal.console, "_file", output)
        with redirect_stdout(output):
            main(list(words))
        return output.getvalue()

    def get_page(self, path: str) -> str:
        """Return a page as its HTML."""
        answer = self.pages.get(path)
        assert answer.status_code == 200, answer.text
        return answer.text

    def write_report(self, run_id: str) -> str:
        """Return the report of a run as its HTML."""
        self.run_command("report", run_id, "--to", str(self.folder / run_id))
        return (self.folder / run_id / "report.html").read_text()

    def call_tool(self, name: str, run_id: str) -> Json:
        """Return the answer of a tool about a run."""
        return TOOLS[name].run_safely(CallContext(AgentSession("x")), {"run_id": run_id})[0]


def find(pattern: str, text: str) -> Claims:
    """Return the named groups of the first match that have matched; nothing without a match."""
    match = re.search(pattern, text, re.DOTALL)
    groups = match.groupdict() if match else {}
    return {name: value for name, value in groups.items() if value is not None}


def strip_tags(page: str) -> str:
    """Return the words of a page without its scripts, each blank as one."""
    words = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", words)).split())


def ask_status(surfaces: Surfaces, run_id: str) -> Claims:
    """Read `lachesis status` of a run that has ended, which shows its results."""
    lines = surfaces.run_command("status", run_id).splitlines()
    width = max((len(line) - len(line.lstrip()) for line in lines if line[:1] == " "), default=19)
    rows: dict[str, str] = {}
    name = ""
    for line in lines:
        name = line[:width].strip() or name
        rows[name] = f"{rows.get(name, '')}\n{line[width:].strip()}".strip()
    flat = {name: " ".join(row.split()) for name, row in rows.items()}
    own = f"{flat['environment']}, held out"
    return {
        **find(
            rf"^first (?P<first_reward>{NUMBER}), last (?P<last_reward>{NUMBER})",
            flat.get("reward", ""),
        ),
        **find(f"^{SHARE.format('before')}", get_first(flat, "held out before", f"{own} before")),
        **find(f"^{SHARE.format('after')}", get_first(flat, "held out after", f"{own} after")),
        **find(rf"(?P<tokens>{NUMBER}(?: \w+)?) tokens", flat.get("took", "")),
        **find(rf"\$(?P<cost>{NUMBER})", flat.get("took", "")),
        **find(r"step (?P<best_checkpoint>\d+):", flat.get("better weights", "")),
        **find(r"^(?P<verdict>[\w ]+)", flat.get("verdict", "")),
        **read_forecast(flat.get("forecast", "")),
        **read_lead(flat.get("result", "")),
        "next_steps": set(rows.get("next", "").splitlines()),
    }


def get_first(rows: dict[str, str], *names: str) -> str:
    """Return the first row that there is."""
    return next((rows[name] for name in names if name in rows), "")


def read_forecast(text: str) -> Claims:
    """Read a forecast as it is written in one sentence."""
    return {
        **find(rf"(?P<forecast_tokens>{NUMBER}(?: [kMG])? to {NUMBER}(?: [kMG])?) tokens", text),
        **find(rf"(?P<forecast_cost>\${NUMBER} to \${NUMBER})", text),
        **find(rf"(?P<forecast_time>{NUMBER} {TIME} to {NUMBER} {TIME}) of training", text),
    }


def read_lead(text: str) -> Claims:
    """Read the first sentence about a run."""
    number = rf"{NUMBER}(?: %)?"
    claims = find(
        rf"reward (?:rose|fell) from (?P<first_reward>{NUMBER}) to (?P<last_reward>{NUMBER})", text
    )
    claims |= find(rf"reward stayed at (?P<last_reward>{NUMBER})", text)
    shares = rf"from (?P<before_share>{number}) to (?P<after_share>{number})(?:,|\.|$)"
    moved = find(f"held-out accuracy {shares}", text)
    if moved:
        claims["told_apart"] = "cannot tell apart" not in text
    return claims


def ask_watch(surfaces: Surfaces, run_id: str) -> Claims:
    """Read the lines of `lachesis watch`."""
    text = surfaces.run_command("watch", run_id)
    return {
        **find(rf", reward (?P<last_reward>{NUMBER}) \(", text),
        **find(rf"held out {SHARE.format('after')} at step [1-9]", text),
        **find(r"verdict: (?P<verdict>[\w ]+?)(?: \(|\n)", text),
    }


def ask_list(surfaces: Surfaces, run_id: str) -> Claims:
    """Read the run's lines of `lachesis runs`."""
    text = surfaces.run_command("runs")
    block = find(rf"(?P<block>\n{run_id} .*?)(?=\n\w|$)", text)["block"]
    words = "healthy|too early|unknown|not learning|suspect|broken|failed|stalled"
    return {
        **find(rf"\d/\d+ +(?P<first_reward>{NUMBER}) → (?P<last_reward>{NUMBER})", block),
        **find(rf"→ {NUMBER} +{SHARE.format('after')}", block),
        **find(rf"\n +(?P<verdict>{words})(?:\n|:|$)", block),
    }


def read_run_page(page: str) -> Claims:
    """Read the page of a run, or its report, which looks the same."""
    text = strip_tags(page)
    lead = find(r'<p class="lead">(?P<lead>.*?)</p>', page).get("lead", "")
    verdict = find(r'<p class="state">(?P<state>.*?)</svg>(?P<verdict>[^<]*)<', page)
    following = find(r"<dt>Next</dt>(?P<next>.*?)</dd>", page).get("next", "")
    return {
        **find(rf"Held out before {SHARE.format('before')}", text),
        **find(rf"(?:Held out|,) after {SHARE.format('after')}", text),
        **find(rf", after {NUMBER}[^)]*\)?\. (?P<after_items>{NUMBER}) items", text),
        **find(rf"Tokens (?P<tokens>{NUMBER}) Cost (?:\$(?P<cost>{NUMBER}))?", text),
        **find(rf"Forecast of tokens (?P<forecast_tokens>{NUMBER} \w to {NUMBER} \w)", text),
        **find(rf"Forecast of cost (?P<forecast_cost>\${NUMBER} to \${NUMBER})", text),
        **find(rf"Forecast of training (?P<forecast_time>{NUMBER} {TIME} to [\d.]+ {TIME})", text),
        **find(rf"Reward (?P<first_reward>{NUMBER}) to (?P<last_reward>{NUMBER})", text),
        **find(r"[Bb]est checkpoint:? step (?P<best_checkpoint>\d+)", text),
        **_read_change(text),
        **read_lead(strip_tags(lead)),
        "verdict": verdict.get("verdict"),
        "next_steps": {
            html.unescape(command)
            for command in re.findall(r'<span class="command"><code>(.*?)</code>', following)
        },
    }


def _read_change(text: str) -> Claims:
    """Read whether the items show the change, of which the interval is given."""
    change = find(rf"the change is {NUMBER} \((?P<low>{NUMBER}) to (?P<high>{NUMBER})\)", text)
    if not change:
        return {}
    low, high = (float(end.replace("−", "-")) for end in (change["low"], change["high"]))
    return {"told_apart": low > 0 or high < 0}


def ask_page(surfaces: Surfaces, run_id: str) -> Claims:
    """Read the page of a run and the points of its curve."""
    address = f"/curves.json?runs={run_id}&metrics=reward/mean&points=4000&mean=15"
    series = json.loads(surfaces.get_page(address))["runs"][run_id]["series"].get("reward/mean")
    claims = read_run_page(surfaces.get_page(f"/runs/{run_id}"))
    return claims | (_read_middle(series["x"], series["mean"]) if series else {})


def _read_middle(x: list[float], means: list[float]) -> Claims:
    """Return a step in the middle of a curve, and the mean of 15 steps that is drawn there."""
    return {"curve_point": (x[len(x) // 2], means[len(x) // 2])}


def ask_report(surfaces: Surfaces, run_id: str) -> Claims:
    """Read the report of a run and the points of its curve."""
    page = surfaces.write_report(run_id)
    data = find(r'<script type="application/json" id="recorded">(?P<data>.*?)</script>', page)
    curves = json.loads(data["data"])[run_id]
    recorded, claims = curves["metrics"].get("reward/mean"), read_run_page(page)
    if recorded:
        x = [curves["axes"]["step"][place] for place in recorded["places"]]
        claims |= _read_middle(x, recorded["means"]["15"])
    return claims


def ask_csv(surfaces: Surfaces, run_id: str) -> Claims:
    """Read the run's line of the list as CSV."""
    rows = csv.DictReader(io.StringIO(surfaces.get_page("/runs.csv")))
    (row,) = (row for row in rows if row["run_id"] == run_id)
    names = {
        "first_reward": "first_reward", "last_reward": "last_reward", "held_out": "after_share",
        "held_out_items": "after_items", "held_out_low": "after_low",
        "held_out_high": "after_high", "tokens": "tokens", "cost_usd": "cost", "health": "verdict",
    }  # fmt: skip
    return {fact: row[column] for column, fact in names.items() if row[column] != ""}


def read_results(answer: Json) -> Claims:
    """Read the results of a run as JSON."""
    reward, actual = answer.get("reward") or {}, answer.get("actual") or {}
    claims: Claims = {
        "first_reward": reward.get("first"),
        "last_reward": reward.get("last"),
        "cost": actual.get("cost_usd"),
        "tokens": sum(actual["tokens"].values()) if actual else None,
        "best_checkpoint": (answer["weights"].get("best") or {}).get("step"),
    }
    before = answer["held_out_intervals"].get("before") or {}
    before["percent_correct"] = answer["held_out"].get("before")
    after = next(iter(answer["held_out_curve"][-1:]), {})
    for moment, point in (("before", before), ("after", after if after.get("step") else {})):
        for fact, key in (("share", "percent_correct"), ("items", "items"), ("low", "low"),
                          ("high", "high")):  # fmt: skip
            claims[f"{moment}_{fact}"] = point.get(key)
    forecast = answer.get("forecast") or {}
    for fact, key in (("tokens", "tokens"), ("time", "hours"), ("cost", "cost_usd")):
        if forecast.get(key):
            factor = 3600 if key == "hours" else 1
            ends = forecast[key]
            claims[f"forecast_{fact}"] = (ends["low"] * factor, ends["high"] * factor)
    return {name: value for name, value in claims.items() if value is not None}


def ask_tool(surfaces: Surfaces, run_id: str) -> Claims:
    """Read the answers of the tools."""
    status = surfaces.call_tool("rl_check_status", run_id)
    return read_results(surfaces.call_tool("rl_get_results", run_id)) | find(
        "^(?P<verdict>.*)$", (status.get("health") or {}).get("word", "")
    )


def ask_http(surfaces: Surfaces, run_id: str) -> Claims:
    """Read the answer of the HTTP service."""
    return read_results(surfaces.routes.get(f"/runs/{run_id}/metrics").json())


def ask_artifact(surfaces: Surfaces, run_id: str) -> Claims:
    """Read the verdict on Prefect's pages."""
    text = prefect_artifacts.render_run_verdict(view_run(surfaces.store, run_id))
    plain = text.replace("\\", "")
    return {
        **find(rf"Held out before {SHARE.format('before')}", plain),
        **find(rf"(?:Held out|,) after {SHARE.format('after')}", plain),
        **find(rf", after {NUMBER}[^)]*\)?\. (?P<after_items>{NUMBER}) items", plain),
        **_read_change(plain),
        **read_lead(plain),
        **find(r"^# .*?: (?P<verdict>[\w ]+)\n", plain),
    }


def ask_card(surfaces: Surfaces, run_id: str) -> Claims:
    """Read the README of the weights of the newest checkpoint."""
    manifest = Checkpoints(surfaces.store.dir(run_id).checkpoints).find_newest()
    if manifest is None:
        return {}
    note = {
        "step": manifest.step,
        "reward": manifest.reward,
        "held_out": manifest.held_out.model_dump() if manifest.held_out else None,
    }
    text = build_model_card(view_run(surfaces.store, run_id), note, "me/weights", merged=False)
    return {
        **find(rf"answers before training \| {SHARE.format('before')} \|", text),
        **find(rf"weights of step \d+ \| {SHARE.format('after')} \|", text),
    }


SURFACES: dict[str, Callable[[Surfaces, str], Claims]] = {
    "status": ask_status,
    "watch": ask_watch,
    "list": ask_list,
    "page": ask_page,
    "report": ask_report,
    "csv": ask_csv,
    "tool": ask_tool,
    "http": ask_http,
    "artifact": ask_artifact,
    "card": ask_card,
}
