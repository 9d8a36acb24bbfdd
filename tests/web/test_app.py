"""The pages as answers to requests: what they say, and what they never hold."""

import csv
import io
import json

import pytest
from starlette.testclient import TestClient

from lachesis.base.files import write_private
from lachesis.checkpoints.manifests import Manifest
from lachesis.launch.resume import make_next_attempt_changes
from lachesis.runs.record import PastAttempt
from lachesis.runs.store import RunStore
from lachesis.web.app import create_app
from lachesis.web.rendering import get_static_prefix
from tests.harness.recorded_runs import make_forecast
from tests.web.recorded import ADDRESS, BEST, FAILED, LIVING, PAGES, SCRIPT, SLOW


@pytest.mark.parametrize("path", PAGES)
def test_each_page_is_whole_and_strict(client, path):
    answer = client.get(path)
    assert answer.status_code == 200
    assert answer.text.rstrip().endswith("</html>")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    # What the policy forbids is not there either.
    assert " style=" not in answer.text
    assert " onclick=" not in answer.text
    assert "<script>" not in answer.text
    assert "http://" not in answer.text.replace("http://www.w3.org", "")


def test_what_others_wrote_is_text(client):
    for path in (f"/runs/{LIVING}", f"/runs/{FAILED}", "/runs", f"/runs/{BEST}/rollouts?group=1-0"):
        text = client.get(path).text
        assert SCRIPT not in text
        assert "&lt;script&gt;" in text


def test_the_list_says_what_needs_a_look(client):
    text = client.get("/runs").text
    assert "Two of 4 runs need a look." in text
    assert "One is running." in text
    assert 'aria-sort="descending"' in text


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", [LIVING, BEST, SLOW, FAILED]),
        ("sort=run", [FAILED, LIVING, SLOW, BEST]),
        ("sort=-held", [BEST, SLOW]),
        ("q=learning_rate<0.001", [SLOW]),
        ("q=learning_rate>=0.00004 sums", [LIVING, BEST, SLOW, FAILED]),
        ("q=night", [BEST]),
        ("q=nothing-like-it", []),
        ("tag=night", [BEST]),
        ("health=look", [SLOW, FAILED]),
        ("state=alive", [LIVING]),
        ("state=failed", [FAILED]),
        ("env=words", []),
        ("page=99", [LIVING, BEST, SLOW, FAILED]),
        ("page=x&sort=-nothing", [BEST, SLOW, LIVING, FAILED]),
    ],
)
def test_the_address_chooses_and_orders_runs(client, query, expected):
    text = client.get(f"/runs?{query}").text
    shown = [part[:8] for part in text.split('data-run="')[1:]]
    if "sort=-held" in query:
        assert shown[:2] == expected
    else:
        assert shown == expected
    rows = list(csv.DictReader(io.StringIO(client.get(f"/runs.csv?{query}").text)))
    assert {row["run_id"] for row in rows} >= set(expected)


def test_ticked_runs_have_letters(client):
    text = client.get(f"/runs?ticked={SLOW},{BEST},eeee0005").text
    assert f'<tr id="run-{SLOW}" data-run="{SLOW}" class="ticked run-a">' in text
    assert f'<tr id="run-{BEST}" data-run="{BEST}" class="ticked run-b">' in text


def test_a_run_says_what_happened(client):
    text = client.get(f"/runs/{BEST}").text
    assert "It learned." in text
    assert "held-out accuracy from 10 % to 95 %." in text
    assert f"lachesis report {BEST}" in text
    assert "lachesis train sums" in text
    assert "so not drawn: seconds a step 0.3 · learning rate 0.001." in text
    assert 'hx-trigger="every 2s"' not in text
    living = client.get(f"/runs/{LIVING}").text
    assert 'hx-trigger="every 2s"' in living
    assert "2 of 10" in living


def test_a_run_tells_its_budget_forecast_and_where_it_is_logged(client, store):
    store.update(BEST, forecast=make_forecast(50))
    (store.dir(BEST).path / "wandb" / "offline-run-1").mkdir(parents=True)
    text = client.get(f"/runs/{BEST}").text
    assert "264 k to 396 k" in text
    assert "55 s to 4 min" in text
    assert "offline, not sent" in text
    assert "No forecast was made" not in text
    config = store.dir(BEST).config
    config.write_text(config.read_text().replace("max_tokens: null", "max_tokens: 480"))
    text = client.get(f"/runs/{BEST}").text
    assert "240 of 480" in text
    assert '<rect class="used" width="500"' in text


def test_a_resumed_run_says_how_its_attempts_ended(client, store):
    assert "How it ended" not in client.get(f"/runs/{FAILED}").text
    store.update(FAILED, started_at="2026-01-01T00:00:00+00:00", stop_reason="its token budget")
    store.update(FAILED, **make_next_attempt_changes(store.load(FAILED)))
    store.update(FAILED, **make_next_attempt_changes(store.load(FAILED)))
    (first, second) = store.load(FAILED).past_attempts
    assert (first.attempt, first.status, first.reason) == (1, "failed", "its token budget")
    assert (second.attempt, second.status, second.reason) == (2, "pending", None)
    text = client.get(f"/runs/{FAILED}").text
    assert "How it ended" in text
    assert "failed: its token budget" in text


def test_a_comparison_names_the_best(client):
    text = client.get(f"/compare?runs={BEST},{SLOW}").text
    assert "A is best:" in text
    assert "with learning_rate 0.00004" in text
    assert "1 of" in text
    for runs in ("", BEST, ",".join(f"{number:08x}" for number in range(9))):
        answer = client.get(f"/compare?runs={runs}")
        assert answer.status_code == 400
        assert "allowed: 2 to 8" in answer.text


def test_an_unknown_run_leads_to_the_nearest(client):
    answer = client.get(f"/runs/{BEST[:-1]}2")
    assert answer.status_code == 404
    assert f'href="/runs/{BEST}"' in answer.text
    assert client.get("/runs/..%2f..%2fetc/logs").status_code == 404
    assert client.get("/nothing").status_code == 404
    assert client.get(f"/runs/{BEST}/logs/nothing").status_code == 400
    assert client.post("/runs").status_code == 405


def test_a_home_without_runs_says_how_to_begin(clean_environment):
    store = RunStore(clean_environment)
    with TestClient(create_app(store=store), base_url=ADDRESS) as client:
        text = client.get("/runs").text
    assert "No runs yet." in text
    assert "lachesis demo" in text


def test_a_damaged_part_leaves_the_rest(client, store):
    store.dir(BEST).config.write_text("[")
    store.dir(SLOW).record.write_text("{")
    store.dir(LIVING).metrics.write_bytes(b"\xff\x00{]\n")
    text = client.get("/runs").text
    assert f'data-run="{BEST}"' in text
    assert f'data-run="{SLOW}"' not in text
    assert client.get(f"/runs/{BEST}").status_code == 200
    assert client.get(f"/runs/{BEST}/settings").status_code == 200
    assert client.get(f"/runs/{LIVING}").status_code == 200
    assert client.get(f"/runs/{SLOW}").status_code == 500
    (store.dir(BEST).rollouts / "steps-00000009-00000009.parquet").write_text("no")
    answer = client.get(f"/runs/{BEST}/rollouts")
    assert answer.status_code == 500
    assert "cannot be read" in answer.text


# --- data


def test_curves_are_thinned_and_smoothed(client):
    address = f"/curves.json?runs={BEST}&metrics=reward/mean,nothing&mean=5"
    run = client.get(address).json()["runs"][BEST]
    assert list(run["series"]) == ["reward/mean"]
    series = run["series"]["reward/mean"]
    assert series["x"] == [1.0, 2.0, 3.0, 4.0]
    assert series["raw"] == [0.1, 0.3, 0.8, 0.9]
    assert series["mean"] == pytest.approx([0.4, 0.525, 0.525, 0.66667])
    assert [point["percent_correct"] for point in run["held_out"]] == [0.1, 0.95]
    by_tokens = client.get(address + "&x=tokens&from=100&to=130").json()["runs"][BEST]
    assert by_tokens["series"]["reward/mean"]["x"] == [60.0, 120.0, 180.0]
    assert by_tokens["held_out"][1]["x"] == 240.0
    by_time = client.get(address + "&x=time").json()["runs"][BEST]
    assert by_time["series"]["reward/mean"]["x"] == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize("query", ["", f"runs={BEST}", f"runs={','.join('abcdefghi')}&metrics=a"])
def test_a_wrong_request_for_curves_says_what_is_allowed(client, query):
    answer = client.get(f"/curves.json?{query}")
    assert answer.status_code == 400
    assert "allowed: 1 to" in answer.text


def test_tables_are_downloaded(client):
    answer = client.get(f"/curves.csv?runs={BEST},{SLOW}&metrics=reward/mean")
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert [row["reward/mean"] for row in rows[:4]] == ["0.1", "0.3", "0.8", "0.9"]
    assert len(rows) == 8
    rows = list(csv.DictReader(io.StringIO(client.get(f"/runs/{BEST}/rollouts.csv").text)))
    assert [(row["step"], row["right"]) for row in rows] == [("4", "2"), ("1", "2")]
    answer = client.get(f"/compare.csv?runs={BEST},{SLOW}")
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert {"name": "learning_rate", BEST: "0.0015", SLOW: "4e-05"} in rows
    assert {"name": "seconds", BEST: "60.0", SLOW: "60.0"} in rows
    settings = client.get(f"/runs/{SLOW}/settings.csv").text
    assert any(line.startswith("learning_rate,tinker,4e-05,") for line in settings.splitlines())
    assert "attachment" in answer.headers["content-disposition"]


def test_checkpoints_and_attempts_are_downloaded(client, store):
    first = PastAttempt(
        attempt=1, started_at="2026-01-03T00:00:00+00:00", duration_s=9.0, first_step=1,
        last_step=2, status="failed", reason="it broke",
    )  # fmt: skip
    store.update(SLOW, attempt=2, past_attempts=[first])
    manifest = Manifest(step=2, state="tinker://x/2", sampler_weights="tinker://x/sampler/2")
    write_private(store.dir(SLOW).checkpoints / "step-2.json", manifest.model_dump_json())
    text = client.get(f"/runs/{SLOW}").text
    tables = {}
    for name in ("attempts", "checkpoints"):
        assert f'href="/runs/{SLOW}/{name}.csv"' in text
        answer = client.get(f"/runs/{SLOW}/{name}.csv").text
        tables[name] = list(csv.DictReader(io.StringIO(answer)))
    assert [row["reason"] for row in tables["attempts"]] == ["it broke", ""]
    (checkpoint,) = tables["checkpoints"]
    assert checkpoint == {"step": "2", "is_final": "False", "is_best": "False", "reward": "0.1"}


def test_a_text_is_no_formula_of_a_spreadsheet(client, store):
    store.update(BEST, note="=1+1")
    assert "'=1+1" in client.get("/runs.csv?tag=night").text


def test_a_log_is_shown_searched_and_downloaded(client):
    text = client.get(f"/runs/{BEST}/logs/trainer").text
    assert "step 1 reward 0.1" in text
    assert "<mark>ValueError: &lt;script&gt;" in text
    found = client.get(f"/runs/{BEST}/logs/trainer?q=REWARD").text
    assert "1 of 1 lines with this text" in found
    assert client.get(f"/runs/{BEST}/logs/trainer.txt").text.startswith("step 1")


LONG = "9" * 5000


@pytest.mark.parametrize(
    "path",
    [
        f"/curves.json?runs={BEST}&metrics=reward/mean&points={LONG}",
        f"/runs/{BEST}/rollouts?group={LONG}-1&page={LONG}&from={LONG}",
        f"/runs?page={LONG}",
        f"/runs/{BEST}?mean={LONG}&from={LONG}",
        "/runs?日=1&a%0d%0ab=2",
    ],
)
def test_an_odd_address_is_no_fault_of_the_server(client, path):
    answer = client.get(path, headers={"HX-Request": "true"})
    assert answer.status_code == 200
    assert answer.headers.get("hx-push-url", "").isascii()


def test_static_files_may_be_kept(client):
    answer = client.get(f"{get_static_prefix()}/common.js")
    assert "immutable" in answer.headers["cache-control"]
    assert client.get("/static/000000000000/common.js").status_code == 404
    assert client.get(f"{get_static_prefix()}/../templates/run_list.html.j2").status_code == 404


def test_filters_by_script_have_a_clean_address(client):
    answer = client.get("/runs?q=&env=sums&health=", headers={"HX-Request": "true"})
    assert answer.headers["hx-push-url"] == "/runs?env=sums"
    assert json.dumps(answer.headers["vary"]).count("HX-Request") == 1
