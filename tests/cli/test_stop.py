"""What `lachesis stop` says is how the run has ended."""

import pytest

from lachesis.base.timestamps import now_iso
from lachesis.cli.main import main
from lachesis.prefect_client import stop
from lachesis.runs.store import RunStore
from tests.harness.home import make_record


@pytest.mark.parametrize(
    ("status", "message"),
    [
        ("completed", "is completed; it ended before it could be stopped"),
        ("failed", "is failed; it ended before it could be stopped"),
        ("stopped", "is stopped; `lachesis resume 0123abcd` continues it from the beginning"),
    ],
)
def test_a_run_that_ends_meanwhile_is_not_being_stopped(
    clean_environment, monkeypatch, capsys, status, message
):
    store = RunStore(clean_environment)
    store.create(make_record(status="running"), config_yaml="")

    def end_instead(store, record, *_):
        store.update(record.run_id, status=status, ended_at=now_iso(), health={"final": True})

    monkeypatch.setattr(stop, "cancel_run", end_instead)
    assert main(["stop", "0123abcd"]) == 0
    assert message in " ".join(capsys.readouterr().out.split())
