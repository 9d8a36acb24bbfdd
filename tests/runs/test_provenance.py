"""What a run is made of is recorded when it is created, and shown."""

import hashlib
import json
import subprocess
import sys

import pytest

from lachesis.cli.main import main
from lachesis.config.run_config import resolve_run_config
from lachesis.operations.runs import view_run
from lachesis.runs.provenance import (
    MAIN_PACKAGES,
    _list_packages,
    read_provenance,
    write_provenance,
)
from lachesis.runs.store import RunStore
from lachesis.web.report_file import write_page
from tests.harness.home import make_record


def git(folder, *words):
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(folder), *author, *words], check=True, capture_output=True)


@pytest.fixture
def record(tmp_path):
    """Write the provenance of a run of an environment with a helper module and a data file."""
    folder = tmp_path / "environments"
    folder.mkdir()
    (folder / "sums.py").write_text("import helper\n")
    (folder / "helper.py").write_text("ANSWER = 12\n")
    (folder / "data.jsonl").write_text("{}\n")
    store = RunStore()
    store.create(make_record(environment_file=str(folder / "sums.py")))

    def write(model="nobody/model"):
        edits = {"tinker": {"sft_file": str(folder / "data.jsonl")}}
        config = resolve_run_config("sums", "embedded", edits, model=model)
        run_dir = store.dir("0123abcd")
        write_provenance(run_dir, {"sums": str(folder / "sums.py")}, config)
        provenance = read_provenance(run_dir)
        assert provenance is not None
        return provenance

    return write


def test_code_data_packages_and_machine_are_recorded(record, tmp_path):
    provenance = record()
    source = provenance["environments"]["sums"]
    digest = hashlib.sha256(b"ANSWER = 12\n").hexdigest()
    assert source["sha256"]["helper.py"] == digest
    copies = RunStore().dir("0123abcd").sources / "sums"
    assert (copies / "helper.py").read_text() == "ANSWER = 12\n"
    assert (copies / "sums.py").stat().st_mode & 0o777 == 0o600
    assert {folder.stat().st_mode & 0o777 for folder in (copies, copies.parent)} == {0o700}
    data_file = str(tmp_path / "environments" / "data.jsonl")
    assert provenance["data"] == {data_file: hashlib.sha256(b"{}\n").hexdigest()}
    assert set(provenance["packages"]) <= set(MAIN_PACKAGES)
    assert provenance["packages"]["prefect"] == "3.8.8"
    assert provenance["machine"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert provenance["model"] == {"name": "nobody/model", "revision": None}


def test_the_commit_and_whether_the_code_was_changed(record, tmp_path):
    folder = tmp_path / "environments"
    assert "commit" not in record()["environments"]["sums"], "nobody keeps it in git"
    git(folder, "init")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "first")
    source = record()["environments"]["sums"]
    assert (len(source["commit"]), source["changed"]) == (40, False)
    (folder / "helper.py").write_text("ANSWER = 13\n")
    assert record()["environments"]["sums"]["changed"]


def test_models_by_revision_or_by_their_files(record, tmp_path, monkeypatch):
    cache = tmp_path / "hub" / "models--nobody--model"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("abc123")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert record()["model"] == {"name": "nobody/model", "revision": "abc123"}
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"x" * 3_000_000)
    hashes = record(str(folder))["model"]["sha256"]
    assert hashes["config.json"] == hashlib.sha256(b"{}").hexdigest()
    assert "first and last megabyte" in hashes["model.safetensors"]


def test_the_command_is_recorded_without_secrets(record, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "very-secret-key-0123456789")
    words = [
        "/bin/lachesis",
        "train",
        "sums",
        "--name",
        "very-secret-key-0123456789",
        "--set",
        "a=b c",
    ]
    monkeypatch.setattr(sys, "argv", words)
    assert record()["command"] == "lachesis train sums --name *** --set 'a=b c'"
    monkeypatch.setattr(sys, "argv", ["/lib/prefect/engine.py", "x"])
    assert record()["command"] is None


def test_status_and_report_show_it(record, tmp_path, capsys):
    provenance = record()
    assert main(["status", "@last", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["provenance"] == provenance
    store = RunStore()
    page = tmp_path / "report" / "report.html"
    write_page(view_run(store, "0123abcd"), page)
    assert "What was run" in page.read_text()
    assert f"prefect {provenance['packages']['prefect']}" in page.read_text()


def test_a_run_of_an_older_release_has_none():
    store = RunStore()
    store.create(make_record())
    assert read_provenance(store.dir("0123abcd")) is None


def test_a_package_that_is_installed_later_is_listed(tmp_path, monkeypatch):
    """A process that lives long, such as an agent's, reads the list again when it has changed."""
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "later-words" not in _list_packages()
    (tmp_path / "later_words-1.2.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: later-words\nVersion: 1.2\n"
    (tmp_path / "later_words-1.2.dist-info" / "METADATA").write_text(metadata)
    assert _list_packages()["later-words"] == "1.2"
